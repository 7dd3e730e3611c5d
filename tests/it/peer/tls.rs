//! Mutual TLS between replicas: who is let in, and certificates that change.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::certs::{Ca, Files};
use crate::harness::replica::{Replica, Spec, agreed, meshed};
use crate::harness::until;

const NAMES: &[&str] = &["*.tidegate"];

fn spec(name: &str, files: &Files) -> Spec {
    Spec { tls: Some(files.mutual(NAMES)), ..Spec::new(name, "100/d") }
}

fn refused(replica: &Replica) -> f64 {
    replica.metric(r#"peer_refusals_total{reason="tls"}"#)
}

/// A replica with sound certificates that one with `other` dials in vain.
async fn is_kept_out(ca: &Ca, other: &Files, names: &[&str]) {
    let sound = Files::new(&ca.sign("a.tidegate"), &ca.pem);
    let r1 = Replica::start(spec("r1", &sound), []).await;
    let stranger = Spec { tls: Some(other.mutual(names)), ..Spec::new("r2", "100/d") };
    let r2 = Replica::start(stranger, [r1.address]).await;
    until("two dials fail", async || r2.look(|engine, _| engine.stats().dial_failures).await >= 2)
        .await;
    assert_eq!((r1.connected().await, r2.connected().await), (0, 0));
    // Nor is it dialled with success.
    r1.list([r2.address]);
    until("it is dialled in vain", async || {
        r1.look(|engine, _| engine.stats().dial_failures).await >= 2
    })
    .await;
    assert_eq!((r1.connected().await, r2.connected().await), (0, 0));
    assert!(refused(&r1) + refused(&r2) > 0.0);
    // What is spent on one side stays there.
    r1.spend("k", 7);
    assert_eq!(r2.remaining("k").await, 100);
}

#[tokio::test]
async fn replicas_with_certificates_of_one_ca_exchange_what_they_spend() {
    let ca = Ca::new();
    let (a, b) = (ca.sign("a.tidegate"), ca.sign("B.TIDEGATE"));
    let (a, b) = (Files::new(&a, &ca.pem), Files::new(&b, &ca.pem));
    let r1 = Replica::start(spec("r1", &a), []).await;
    let r2 = Replica::start(spec("r2", &b), [r1.address]).await;
    meshed(&[&r1, &r2]).await;
    assert_eq!(r1.spend("k", 7) + r2.spend("k", 5), 12);
    agreed(&[&r1, &r2], "k", 88).await;
    assert!(r1.metric("peer_certificate_not_after_timestamp_seconds") > 2e9);
}

#[tokio::test]
async fn spiffe_ids_and_one_certificate_for_all_are_names_too() {
    let ca = Ca::new();
    for (name, pattern) in [
        ("spiffe://prod/ns/shop/sa/api", "spiffe://prod/ns/shop/*"),
        ("*.tidegate.shop.svc", "*.tidegate.shop.svc"),
        ("tidegate.shop.svc", "tidegate.shop.svc"),
    ] {
        let files = Files::new(&ca.sign(name), &ca.pem);
        let spec = |name| Spec { tls: Some(files.mutual(&[pattern])), ..Spec::new(name, "100/d") };
        let r1 = Replica::start(spec("r1"), []).await;
        let r2 = Replica::start(spec("r2"), [r1.address]).await;
        meshed(&[&r1, &r2]).await;
    }
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_kept_out() {
    let (ca, other) = (Ca::new(), Ca::new());
    // It would trust the first; the first does not trust it.
    let both = format!("{}{}", ca.pem, other.pem);
    is_kept_out(&ca, &Files::new(&other.sign("a.tidegate"), &both), NAMES).await;
}

#[tokio::test]
async fn a_certificate_for_another_name_is_kept_out() {
    let ca = Ca::new();
    let other = Files::new(&ca.sign("a.other"), &ca.pem);
    is_kept_out(&ca, &other, &["*.tidegate", "*.other"]).await;
}

#[tokio::test]
async fn an_expired_certificate_is_kept_out() {
    let ca = Ca::new();
    let expired = Files::new(&ca.sign_expired("a.tidegate"), &ca.pem);
    is_kept_out(&ca, &expired, NAMES).await;
}

#[tokio::test]
async fn who_speaks_plain_text_is_kept_out() {
    let ca = Ca::new();
    let files = Files::new(&ca.sign("a.tidegate"), &ca.pem);
    let r1 = Replica::start(spec("r1", &files), []).await;
    let mut plain = TcpStream::connect(r1.address).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    until("it is counted", async || refused(&r1) == 1.0).await;
    // Neither does one that says nothing keep others out.
    let _silent = TcpStream::connect(r1.address).await.unwrap();
    let r2 = Replica::start(spec("r2", &files), [r1.address]).await;
    meshed(&[&r1, &r2]).await;
}

#[tokio::test]
async fn certificates_are_replaced_while_sessions_stay() {
    let (old, new) = (Ca::new(), Ca::new());
    let (a, b) = (
        Files::new(&old.sign("a.tidegate"), &old.pem),
        Files::new(&old.sign("b.tidegate"), &old.pem),
    );
    let r1 = Replica::start(spec("r1", &a), []).await;
    let r2 = Replica::start(spec("r2", &b), [r1.address]).await;
    meshed(&[&r1, &r2]).await;
    let before = r1.look(|engine, _| engine.sessions().collect::<Vec<_>>()).await;

    // A key that is not the certificate's: refused, once, and the old ones stay.
    let (cert, key) = new.sign("a.tidegate");
    let reads = |replica: &Replica, result: &str| {
        replica.metric(&format!("peer_certificate_reads_total{{result=\"{result}\"}}"))
    };
    a.write("tls.key", &key);
    until("it is refused", async || reads(&r1, "failure") >= 1.0).await;
    let r3 = Replica::start(spec("r3", &b), [r1.address]).await;
    until("the old ones are in use", async || r3.connected().await >= 1).await;
    drop(r3);

    a.write("tls.crt", &cert);
    a.write("ca.crt", &new.pem);
    until("all are replaced", async || {
        let c = Files::new(&new.sign("c.tidegate"), &new.pem);
        let r4 = Replica::start(spec("r4", &c), [r1.address]).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        r4.connected().await == 1
    })
    .await;
    assert!(reads(&r1, "success") >= 1.0);
    // The session of before is still there, and still of use.
    let now = r1.look(|engine, _| engine.sessions().collect::<Vec<_>>()).await;
    assert!(before.iter().all(|session| now.contains(session)), "{before:?} {now:?}");
    assert_eq!(r2.spend("k", 5), 5);
    agreed(&[&r1, &r2], "k", 95).await;
    // Who has only the old certificates comes in no more.
    let r5 = Replica::start(spec("r5", &b), [r1.address]).await;
    until("it is dialled in vain", async || {
        r5.look(|engine, _| engine.stats().dial_failures).await >= 2
    })
    .await;
    assert_eq!(r5.connected().await, 0);
}
