//! TLS on the proxy port and on the admin port.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::harness::certs::{Ca, Files};
use crate::harness::{PATIENCE, Setup, TestProxy, Upstream, eventually, limit};

type Tls = StreamOwned<ClientConnection, TcpStream>;

fn config(ca: &str, own: Option<&(String, String)>, protocols: &[&[u8]]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for ca in CertificateDer::pem_slice_iter(ca.as_bytes()) {
        roots.add(ca.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let chain = vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Arc::new(config)
}

/// Connects, says `before` in plain text and ends the handshake.
fn connect(to: SocketAddr, config: Arc<ClientConfig>, before: &[u8]) -> io::Result<Tls> {
    let mut io = TcpStream::connect(to)?;
    io.set_read_timeout(Some(PATIENCE))?;
    io.write_all(before)?;
    let name = "localhost".try_into().unwrap();
    let mut tls = ClientConnection::new(config, name).map_err(io::Error::other)?;
    while tls.is_handshaking() {
        tls.complete_io(&mut io)?;
    }
    Ok(StreamOwned::new(tls, io))
}

/// Asks once; the status and the head of the answer.
fn get(tls: &mut Tls) -> io::Result<(u16, String)> {
    tls.write_all(b"GET / HTTP/1.1\r\nhost: app.example\r\n\r\n")?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        tls.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    tls.read_exact(&mut body)?;
    Ok((head[9..12].parse().unwrap(), head))
}

fn start(upstream: &Upstream, files: &Files, client_ca: bool) -> TestProxy {
    Setup::before(upstream)
        .with(|config| config.tls = Some(files.serving(client_ca, &["*.clients"])))
        .with(|config| {
            if !client_ca {
                config.tls.as_mut().unwrap().names.clear();
            }
        })
        .start()
}

fn handshakes(proxy: &TestProxy, result: &str) -> f64 {
    proxy.metric(&format!("tidegate_proxy_handshakes_total{{result=\"{result}\"}}"))
}

#[test]
fn requests_come_over_tls_and_the_upstream_is_told_so() {
    let ca = Ca::new();
    let files = Files::new(&ca.sign("localhost"), &ca.pem);
    let upstream = Upstream::start();
    let proxy = start(&upstream, &files, false);
    for (offered, chosen) in [
        (&[&b"http/1.1"[..]][..], Some(&b"http/1.1"[..])),
        (&[b"http/1.1", b"h2"], Some(b"h2")),
        (&[], None),
    ] {
        let mut tls = connect(proxy.address, config(&ca.pem, None, offered), b"").unwrap();
        assert_eq!(tls.conn.alpn_protocol(), chosen);
        if chosen != Some(b"h2") {
            assert_eq!(get(&mut tls).unwrap().0, 200);
            assert_eq!(get(&mut tls).unwrap().0, 200);
        }
    }
    let seen = upstream.requests().pop().unwrap();
    assert_eq!(seen.field("x-forwarded-proto"), Some("https"));
    assert_eq!(seen.field("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(upstream.count(), 4);
    eventually("each is counted", || handshakes(&proxy, "done") == 3.0);
    assert!(proxy.metric("tidegate_proxy_certificate_not_after_timestamp_seconds") > 2e9);
    // Neither what HTTP cannot read nor a refused body keeps its answer from a client.
    let mut tls = connect(proxy.address, config(&ca.pem, None, &[]), b"").unwrap();
    tls.write_all(b"no request\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    tls.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 400 "), "{}", answer.escape_ascii());
}

#[test]
fn http2_over_tls_is_limited_as_any_other() {
    let ca = Ca::new();
    let files = Files::new(&ca.sign("localhost"), &ca.pem);
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .limit(limit("all", "2/40d"))
        .with(|config| config.tls = Some(files.serving(false, &[])))
        .start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let statuses = runtime.block_on(async {
        let connector = tokio_rustls::TlsConnector::from(config(&ca.pem, None, &[b"h2"]));
        let io = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
        let io = connector.connect("localhost".try_into().unwrap(), io).await.unwrap();
        let (client, connection) = h2::client::handshake(io).await.unwrap();
        tokio::spawn(connection);
        let mut client = client.ready().await.unwrap();
        let mut statuses = Vec::new();
        for _ in 0..3 {
            let request = http::Request::get("https://app.example/").body(()).unwrap();
            let (answer, _) = client.send_request(request, true).unwrap();
            statuses.push(answer.await.unwrap().status().as_u16());
            client = client.ready().await.unwrap();
        }
        statuses
    });
    assert_eq!((statuses, upstream.count()), (vec![200, 200, 429], 2));
}

#[test]
fn http_without_tls_is_answered_400_and_other_bytes_are_not_served() {
    let ca = Ca::new();
    let files = Files::new(&ca.sign("localhost"), &ca.pem);
    let upstream = Upstream::start();
    let proxy = start(&upstream, &files, false);
    for text in ["GET / HTTP/1.1\r\nhost: a\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut plain = proxy.connect();
        plain.send(text);
        let answer = plain.answer();
        assert_eq!(answer.status, 400);
        let body = String::from_utf8(answer.body).unwrap();
        assert!(body.contains("use https"), "{body}");
        assert!(plain.is_ended());
    }
    let mut noise = proxy.connect();
    noise.send([0_u8; 64]);
    assert!(noise.rest().len() < 16, "an alert at most");
    // Who leaves, be it in the middle of the handshake, costs nobody anything.
    drop(proxy.connect());
    let mut half = proxy.connect();
    half.send([0x16, 3, 1, 2, 0, 1]);
    drop(half);
    eventually("they are gone", || proxy.handle.connections() == 0);
    eventually("each is counted", || {
        (handshakes(&proxy, "text"), handshakes(&proxy, "failed")) == (2.0, 2.0)
    });
    let mut tls = connect(proxy.address, config(&ca.pem, None, &[]), b"").unwrap();
    assert_eq!((get(&mut tls).unwrap().0, upstream.count()), (200, 1));
}

#[test]
fn a_handshake_has_the_time_of_a_head_and_too_many_end_the_oldest() {
    let ca = Ca::new();
    let files = Files::new(&ca.sign("localhost"), &ca.pem);
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .with(|config| {
            config.tls = Some(files.serving(false, &[]));
            config.timeouts.header = Duration::from_secs(3);
        })
        .start();
    let mut silent: Vec<_> = (0..300).map(|_| proxy.connect()).collect();
    eventually("the oldest had to go", || handshakes(&proxy, "displaced") == 44.0);
    // The others do not keep anybody out.
    let mut tls = connect(proxy.address, config(&ca.pem, None, &[]), b"").unwrap();
    assert_eq!(get(&mut tls).unwrap().0, 200);
    assert!(silent[0].is_ended());
    eventually("the others were too late", || handshakes(&proxy, "late") >= 255.0);
    assert!(silent[299].is_ended());
}

#[test]
fn the_proxy_protocol_comes_before_the_handshake() {
    let ca = Ca::new();
    let files = Files::new(&ca.sign("localhost"), &ca.pem);
    let upstream = Upstream::start();
    let proxy = Setup::before(&upstream)
        .trusting(&["127.0.0.1/32"])
        .with(|config| {
            config.tls = Some(files.serving(false, &[]));
            config.proxy_protocol = true;
        })
        .start();
    let before = b"PROXY TCP4 203.0.113.7 192.0.2.1 56324 443\r\n";
    let mut tls = connect(proxy.address, config(&ca.pem, None, &[]), before).unwrap();
    assert_eq!(get(&mut tls).unwrap().0, 200);
    let seen = upstream.requests().pop().unwrap();
    assert_eq!(seen.field("x-forwarded-for"), Some("203.0.113.7"));
    // A handshake where the protocol is due is none.
    assert!(connect(proxy.address, config(&ca.pem, None, &[]), b"").is_err());
}

#[test]
fn a_client_needs_a_certificate_of_the_ca_for_an_allowed_name() {
    let (ca, other) = (Ca::new(), Ca::new());
    let files = Files::new(&ca.sign("localhost"), &ca.pem);
    let upstream = Upstream::start();
    let proxy = start(&upstream, &files, true);
    let ask = |own: Option<&(String, String)>| {
        let mut tls = connect(proxy.address, config(&ca.pem, own, &[]), b"")?;
        get(&mut tls)
    };
    assert_eq!(ask(Some(&ca.sign("a.clients"))).unwrap().0, 200);
    for own in [
        None,
        Some(ca.sign("a.others")),
        Some(ca.sign_expired("a.clients")),
        Some(other.sign("a.clients")),
    ] {
        assert!(ask(own.as_ref()).is_err());
    }
    assert_eq!(upstream.count(), 1);
    eventually("each is counted", || handshakes(&proxy, "failed") == 4.0);
}

#[test]
fn a_certificate_is_replaced_while_connections_stay_also_when_its_files_change_all_the_time() {
    let (old, new) = (Ca::new(), Ca::new());
    let files = Files::new(&old.sign("localhost"), &old.pem);
    let upstream = Upstream::start();
    let proxy = start(&upstream, &files, false);
    let mut open = connect(proxy.address, config(&old.pem, None, &[]), b"").unwrap();
    assert_eq!(get(&mut open).unwrap().0, 200);
    let reads = |result: &str| {
        proxy.metric(&format!("tidegate_proxy_certificate_reads_total{{result=\"{result}\"}}"))
    };
    let trusted = |ca: &Ca| {
        connect(proxy.address, config(&ca.pem, None, &[]), b"")
            .and_then(|mut tls| get(&mut tls))
            .is_ok_and(|(status, _)| status == 200)
    };
    // A key of another certificate, a truncated certificate, one that has ended, none.
    let (cert, key) = new.sign("localhost");
    files.write("tls.key", &key);
    eventually("another key is refused", || reads("failure") == 1.0);
    files.write("tls.crt", &cert[..cert.len() / 2]);
    eventually("half a certificate is refused", || reads("failure") == 2.0);
    let (ended, ended_key) = new.sign_expired("localhost");
    files.write("tls.key", &ended_key);
    files.write("tls.crt", &ended);
    eventually("one that has ended is refused", || reads("failure") >= 3.0);
    std::fs::remove_file(files.path().join("tls.crt")).unwrap();
    let before = reads("failure");
    eventually("one that is gone is missed", || reads("failure") > before);
    assert!(trusted(&old) && !trusted(&new));
    // 100 times a second, each time the certificate first and the key a moment later.
    let pairs: Vec<_> = (0..8).map(|_| new.sign("localhost")).collect();
    for (cert, key) in pairs.iter().cycle().take(250) {
        files.write("tls.crt", cert);
        files.write("tls.key", key);
        std::thread::sleep(Duration::from_millis(10));
    }
    eventually("a new one is in use", || trusted(&new));
    assert!(!trusted(&old));
    assert_eq!(get(&mut open).unwrap().0, 200);
    assert!(proxy.failure().is_none());
}

#[test]
fn a_certificate_that_ends_while_connections_are_open_does_not_end_them() {
    let ca = Ca::new();
    let files = Files::new(&ca.sign_for("localhost", Duration::from_secs(3)), &ca.pem);
    let upstream = Upstream::start();
    let proxy = start(&upstream, &files, false);
    let mut open = connect(proxy.address, config(&ca.pem, None, &[]), b"").unwrap();
    assert_eq!(get(&mut open).unwrap().0, 200);
    let refused = || connect(proxy.address, config(&ca.pem, None, &[]), b"").is_err();
    eventually("clients refuse it", refused);
    assert_eq!(get(&mut open).unwrap().0, 200);
    files.write("tls.key", &ca.sign("localhost").1);
    let (cert, key) = ca.sign("localhost");
    files.write("tls.crt", &cert);
    files.write("tls.key", &key);
    eventually("they take another", || !refused());
    assert_eq!(get(&mut open).unwrap().0, 200);
}

#[test]
fn files_that_cannot_be_used_are_named_at_the_start() {
    use tidegate::tls::{Clients, Server};
    let ca = Ca::new();
    let (cert, key) = ca.sign("localhost");
    let fault = |change: &dyn Fn(&Files)| {
        let files = Files::new(&(cert.clone(), key.clone()), &ca.pem);
        change(&files);
        let error = Server::load(files.serving(true, &[]), Clients::Required, &[]).unwrap_err();
        error.to_string()
    };
    for (file, content, words) in [
        ("tls.key", ca.sign("localhost").1, &["private key ", "not that of the certificate"][..]),
        ("tls.key", cert.clone(), &["private key ", "no private key"]),
        ("tls.key", key[..60].to_owned(), &["private key ", "not sound PEM"]),
        ("tls.crt", cert[..200].to_owned(), &["certificate ", "not sound PEM"]),
        ("tls.crt", String::new(), &["certificate ", "no certificate"]),
        ("ca.crt", String::new(), &["CA certificates ", "no certificate"]),
    ] {
        let text = fault(&|files| files.write(file, &content));
        assert!([file, words[0], words[1]].iter().all(|word| text.contains(word)), "{text}");
    }
    let gone = fault(&|files| std::fs::remove_file(files.path().join("ca.crt")).unwrap());
    assert!(gone.starts_with("CA certificates ") && gone.contains("ca.crt: No such"), "{gone}");
    // There is nothing better than one that has ended, and another may come.
    let ended = Files::new(&ca.sign_expired("localhost"), &ca.pem);
    assert!(Server::load(ended.serving(false, &[]), Clients::Required, &[]).is_ok());
}

#[tokio::test]
async fn operators_need_a_certificate_or_the_token_and_the_kubelet_neither() {
    use crate::admin::{Replica, limit_set, run};
    use tidegate::admin::{AdminServer, Metrics};

    let (ca, other) = (Ca::new(), Ca::new());
    let files = Files::new(&ca.sign("a.admin"), &ca.pem);
    files.write("token", "0123456789abcdef");
    for (name, pair) in
        [("ops", ca.sign("a.ops")), ("dev", ca.sign("a.dev")), ("out", other.sign("a.ops"))]
    {
        files.write(&format!("{name}.crt"), &pair.0);
        files.write(&format!("{name}.key"), &pair.1);
    }
    files.write("other.crt", &other.pem);
    let at = |name: &str| files.path().join(name).display().to_string();
    for with_token in [false, true] {
        let guard = |server: AdminServer| {
            let metrics = Metrics::register(&mut Registry::default());
            let server = server.with_tls(files.serving(true, &["*.ops"]), metrics).unwrap();
            if with_token {
                server.with_token(&files.path().join("token")).unwrap()
            } else {
                server
            }
        };
        let replica =
            Replica::start_guarded(limit_set(), Vec::new(), guard, |service| service).await;
        let address = replica.address;
        let ask = async |admin: String, flags: &[&str]| {
            let args = [&["limits", "--admin", &admin], flags].concat();
            run(&args, None).await.map(drop).map_err(|error| error.to_string())
        };
        let tls = || format!("https://{address}");
        let (root, ops, ops_key) = (at("ca.crt"), at("ops.crt"), at("ops.key"));
        let named = ["--tls-ca", &root, "--tls-name", "a.admin"];
        let own = |cert: &'static str| {
            let (cert, key) = (at(&format!("{cert}.crt")), at(&format!("{cert}.key")));
            [cert, key]
        };
        let full = [&named[..], &["--tls-cert", &ops, "--tls-key", &ops_key]].concat();
        assert_eq!(ask(tls(), &full).await, Ok(()));
        for stranger in ["dev", "out"] {
            let [cert, key] = own(stranger);
            let flags = [&named[..], &["--tls-cert", &cert, "--tls-key", &key]].concat();
            assert!(ask(tls(), &flags).await.is_err(), "{stranger}");
        }
        let error = ask(tls(), &named).await.unwrap_err();
        let wanted = if with_token { "a token is needed" } else { "certificate is needed" };
        assert!(error.contains(wanted), "{error}");
        let token = at("token");
        let with = [&named[..], &["--token-file", &token]].concat();
        assert_eq!(ask(tls(), &with).await.is_ok(), with_token);
        // The replica is known by its certificate.
        let error = ask(tls(), &["--tls-ca", &root]).await.unwrap_err();
        assert!(error.contains("not valid for name"), "{error}");
        let wrong = at("other.crt");
        let error = ask(tls(), &["--tls-ca", &wrong, "--tls-name", "a.admin"]).await.unwrap_err();
        // The two CAs have one name, so that the signature tells them apart.
        assert!(error.contains("invalid peer certificate"), "{error}");
        assert!(ask(address.to_string(), &[]).await.is_err());
        assert!(ask(address.to_string(), &named).await.unwrap_err().contains("https://"));
    }
}
