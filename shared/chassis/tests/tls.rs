//! TLS over the real loopback: answers, a new certificate while running, and clients that never finish a handshake.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::routing::get;
use chassis::net::tls::{Tls, TlsConfig, TlsError};
use chassis::net::{TcpNetwork, http};
use chassis::{Address, Network, Shutdown, Tasks};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Writes a fresh self-signed certificate for localhost and its key.
fn issue(dir: &Path) -> (TlsConfig, rcgen::Certificate) {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let config = TlsConfig { certificate: dir.join("tls.crt"), key: dir.join("tls.key") };
    std::fs::write(&config.key, signing_key.serialize_pem()).unwrap();
    std::fs::write(&config.certificate, cert.pem()).unwrap();
    (config, cert)
}

/// What a client that trusts `root` alone gets for `GET /`.
async fn fetch(address: &Address, root: &rcgen::Certificate) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(root.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn answers_are_encrypted_and_a_renewed_certificate_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let (config, first) = issue(dir.path());
    let listener = TcpNetwork::default().bind("http", &"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local().clone();
    let shutdown = Shutdown::new();
    let tasks = Tasks::new(shutdown.clone());
    let tls = Tls::start(&tasks, config).await.unwrap();
    http::serve(&tasks, "http", tls.secure(listener), axum::Router::new().route("/", get(async || "hello")));

    // Two that never shake hands, in silence and in the wrong protocol, are in nobody's way.
    let _silent = TcpStream::connect((address.host.as_str(), address.port)).await.unwrap();
    let mut plain = TcpStream::connect((address.host.as_str(), address.port)).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let answer = fetch(&address, &first).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("hello"), "{answer}");
    let mut refused = Vec::new();
    plain.read_to_end(&mut refused).await.unwrap();
    assert!(!refused.starts_with(b"HTTP"), "plain HTTP got an answer");

    // The clock runs ahead for the watcher alone: loopback I/O takes no virtual time.
    let (_, second) = issue(dir.path());
    let error = fetch(&address, &second).await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "the new one is not known yet: {error}");
    tokio::time::pause();
    tokio::time::sleep(Duration::from_secs(11)).await;
    tokio::time::resume();
    let mut answer = fetch(&address, &second).await;
    for _ in 0..50 {
        if answer.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        answer = fetch(&address, &second).await;
    }
    assert!(answer.unwrap().ends_with("hello"));
    shutdown.begin_drain();
    shutdown.begin_stop();
    tasks.join().await.unwrap();
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (config, _) = issue(dir.path());
    let tasks = Tasks::new(Shutdown::new());
    let start = async |config: &TlsConfig| Tls::start(&tasks, config.clone()).await.map(|_| ());

    std::fs::write(&config.key, "no key").unwrap();
    let error = start(&config).await.unwrap_err();
    assert!(matches!(&error, TlsError::Pem { file, .. } if *file == config.key), "{error}");
    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let (stranger, _) = issue(&other);
    std::fs::copy(&stranger.key, &config.key).unwrap();
    let error = start(&config).await.unwrap_err();
    assert!(matches!(&error, TlsError::Certificate { .. }), "a key of another certificate: {error}");
    let missing = TlsConfig { certificate: dir.path().join("none.crt"), ..config };
    let error = start(&missing).await.unwrap_err();
    assert!(matches!(&error, TlsError::Read { .. }) && error.to_string().contains("none.crt"), "{error}");
}
