//! What operators change and ask on whole replicas.

use tidegate::wire::tidegate::admin::v1 as pb;
use tidegate::wire::tidegate::admin::v1::admin_client::AdminClient;
use tonic::transport::Channel;

use crate::harness::app::{Network, Replica, Spec, agreed, meshed, until};

/// Refills nothing that matters while a test runs.
const ALL: &str = "name: all, key: [], rate: 30/40d";
const BY_PATH: &str = "name: by-path, key: [path], rate: 10/40d";

fn ask<T>(replica: &Replica, question: impl AsyncFnOnce(AdminClient<Channel>) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let address = format!("http://{}", replica.addresses.admin);
        question(AdminClient::connect(address).await.unwrap()).await
    })
}

fn reset(replica: &Replica, limit: &str, bucket: pb::reset_bucket_request::Bucket) -> u64 {
    let request = pb::ResetBucketRequest { limit: limit.into(), bucket: Some(bucket) };
    ask(replica, async |mut admin| admin.reset_bucket(request).await.unwrap().into_inner().buckets)
}

#[test]
fn a_reset_on_one_replica_is_seen_on_all_and_survives_a_rejoin() {
    use pb::reset_bucket_request::Bucket;
    let network = Network::new();
    let spec = Spec::new([ALL, BY_PATH]);
    network.list(&[11, 12, 13]);
    let [a, b, c] = [11, 12, 13].map(|host| network.start(host, &spec));
    meshed(&[&a, &b, &c]);
    assert_eq!((a.spend("/x", 10), b.spend("/y", 10)), (10, 10));
    agreed(&[&a, &b, &c], "all", &[], 10);
    agreed(&[&a, &b, &c], "by-path", &["/x"], 0);

    // One bucket, on a replica that spent nothing from it.
    let key = pb::Key {
        parts: vec![pb::KeyValue { value: Some(pb::key_value::Value::Text("/x".into())) }],
    };
    assert_eq!(reset(&c, "by-path", Bucket::Key(key)), 1);
    agreed(&[&a, &b, &c], "by-path", &["/x"], 10);
    agreed(&[&a, &b, &c], "by-path", &["/y"], 0);
    agreed(&[&a, &b, &c], "all", &[], 10);

    // A whole limit; the other keeps what was spent.
    assert_eq!(reset(&b, "by-path", Bucket::All(true)), 2);
    agreed(&[&a, &b, &c], "by-path", &["/y"], 10);
    agreed(&[&a, &b, &c], "all", &[], 10);

    // A replica that comes back learns of it, and brings nothing old with it.
    a.kill();
    assert_eq!(b.spend("/x", 4), 4);
    let again = network.start(11, &spec);
    meshed(&[&again, &b, &c]);
    agreed(&[&again, &b, &c], "by-path", &["/x"], 6);
    agreed(&[&again, &b, &c], "by-path", &["/y"], 10);
}

#[test]
fn an_explanation_is_what_the_replica_then_answers() {
    let network = Network::new();
    let replica = network.start(11, &Spec::new([ALL, BY_PATH]).alone());
    replica.ready();
    let explain = |target: &str| {
        let request = pb::ExplainRequest {
            target: target.into(),
            peer_address: "127.0.0.1".into(),
            ..pb::ExplainRequest::default()
        };
        ask(&replica, async |mut admin| admin.explain(request).await.unwrap().into_inner())
    };
    for n in 0..12 {
        let told = explain("/x").answer.unwrap();
        let given = replica.get("/x");
        assert_eq!(told.forwarded, n < 10);
        assert_eq!(given.status, if n < 10 { 200 } else { u16::try_from(told.status).unwrap() });
        for header in told.headers {
            assert_eq!(given.field(&header.name), Some(header.value.as_str()), "{}", header.name);
        }
    }
    assert_eq!(explain("/x").answer.unwrap().refused_by, "by-path");
    assert!(explain("/y").answer.unwrap().forwarded);
    assert_eq!(replica.requests("by-path", "refused"), 2.0);
    until("no bucket for what was only asked about", || replica.metric("tidegate_buckets") == 2.0);
}

#[test]
fn the_configuration_in_force_is_told_with_its_defaults() {
    let network = Network::new();
    let replica = network.start(11, &Spec::new([ALL]).alone());
    let told = ask(&replica, async |mut admin| {
        admin.get_config(pb::GetConfigRequest {}).await.unwrap().into_inner()
    });
    let again = tidegate::config::parse("told", &told.yaml, &|_| None).unwrap();
    assert_eq!(again.limits().len(), 1);
    assert_eq!(again.effective(), told.yaml);
    assert!(told.yaml.contains("drain_timeout"), "{}", told.yaml);
    assert_eq!(told.last_error, "");
}

#[test]
fn what_is_paused_on_one_replica_is_refused_on_all_until_it_is_resumed() {
    use pb::{pause_request, resume_request};
    let network = Network::new();
    let spec = Spec::new(["name: by-path, key: [path], rate: 100/s"]);
    network.list(&[11, 12]);
    let [a, b] = [11, 12].map(|host| network.start(host, &spec));
    meshed(&[&a, &b]);
    let key = || pb::Key {
        parts: vec![pb::KeyValue { value: Some(pb::key_value::Value::Text("/x".into())) }],
    };
    let pause = |replica: &Replica, bucket, seconds| {
        let pause_for = Some(prost_types::Duration { seconds, nanos: 0 });
        let request = pb::PauseRequest { limit: "by-path".into(), bucket: Some(bucket), pause_for };
        ask(replica, async |mut admin| admin.pause(request).await.unwrap());
    };
    let resume = |replica: &Replica, bucket| {
        let request = pb::ResumeRequest { limit: "by-path".into(), bucket: Some(bucket) };
        ask(replica, async |mut admin| admin.resume(request).await.unwrap().into_inner())
    };
    // One bucket, that nobody has used yet.
    pause(&a, pause_request::Bucket::Key(key()), 3600);
    until("the peer refuses", || b.get("/x").status == 429);
    let refused = a.get("/x");
    let after: u64 = refused.field("retry-after").unwrap().parse().unwrap();
    assert!((3500..=3600).contains(&after), "{after}");
    let state = refused.field("ratelimit").unwrap();
    assert!(state.starts_with("\"by-path\";r=0;t=3"), "{state}");
    assert_eq!(b.get("/y").status, 200);
    until("the metric counts it", || b.metric("tidegate_paused_buckets{limit=\"by-path\"}") == 1.0);
    // The whole limit: a bucket that is resumed by itself stays closed with it.
    pause(&b, pause_request::Bucket::All(true), 7200);
    until("all are closed", || a.get("/y").status == 429);
    let told = resume(&b, resume_request::Bucket::Key(key()));
    assert!(told.paused_for.unwrap().seconds > 7000);
    assert_eq!(b.get("/x").status, 429);
    assert_eq!(resume(&a, resume_request::Bucket::All(true)).paused_for, None);
    until("all are open", || ["/x", "/y"].iter().all(|path| b.get(path).status == 200));
    assert_eq!((a.get("/x").status, a.get("/y").status), (200, 200));
}
