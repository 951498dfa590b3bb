//! Sockets, servers and their ends, over the real loopback.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::routing::get;
use chassis::admin::Admin;
use chassis::net::{TcpNetwork, http, inherited};
use chassis::{Address, Listener, Metrics, Network, Shutdown, Socket, Tasks};
use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn bind(name: &'static str) -> (chassis::Listener, Address) {
    let listener = TcpNetwork::default().bind(name, &"127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local().clone();
    (listener, address)
}

#[tokio::test]
async fn the_admin_port_tells_the_truth() {
    let (listener, address) = bind("admin").await;
    let shutdown = Shutdown::new();
    let tasks = Tasks::new(shutdown.clone());
    let ready = Arc::new(AtomicBool::new(false));
    let metrics = Metrics::new();
    metrics.counter("router_requests", "Requests").inc();
    let probed = Arc::clone(&ready);
    let admin = Admin {
        live: Arc::new(|| Ok(())),
        ready: Arc::new(move || probed.load(Ordering::SeqCst).then_some(()).ok_or_else(|| "no pair".into())),
        metrics,
    };
    http::serve_admin(&tasks, listener, admin);
    let fetch = async |path: &str| {
        let answer = reqwest::get(format!("http://{address}{path}")).await.unwrap();
        let kind = answer.headers()["content-type"].to_str().unwrap().to_owned();
        (answer.status().as_u16(), kind, answer.text().await.unwrap())
    };
    assert_eq!(fetch("/health/live").await.0, 200);
    let (status, _, body) = fetch("/health/ready").await;
    assert_eq!((status, body.as_str()), (503, r#"{"status":"unavailable","reason":"no pair"}"#));
    ready.store(true, Ordering::SeqCst);
    assert_eq!(fetch("/health/ready").await.0, 200);
    let (_, kind, body) = fetch("/metrics").await;
    assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
    assert!(body.contains("damask_router_requests_total 1"), "{body}");
    shutdown.begin_drain();
    tokio::time::timeout(Duration::from_secs(5), tasks.join()).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_drain_lets_an_open_answer_finish_and_admits_no_other() {
    let (listener, address) = bind("http").await;
    let shutdown = Shutdown::new();
    let tasks = Tasks::new(shutdown.clone());
    let (started, mut has_started) = tokio::sync::mpsc::channel(1);
    let app = axum::Router::new().route(
        "/slow",
        get(async move || {
            started.send(()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            "done"
        }),
    );
    http::serve(&tasks, "http", listener, app);
    let url = format!("http://{address}/slow");
    let (answer, joined) = tokio::join!(reqwest::get(&url), async {
        has_started.recv().await.unwrap();
        shutdown.begin_drain();
        tasks.join().await
    });
    assert_eq!(answer.unwrap().text().await.unwrap(), "done");
    joined.unwrap();
    assert!(reqwest::get(&url).await.is_err(), "the port is closed");
}

#[test]
fn a_child_receives_the_sockets_by_name() {
    let (grpc, admin) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "child_of_a_supervisor", "--nocapture"]);
    inherited::pass_sockets(&mut child, &[("grpc", &grpc), ("admin", &admin)]).unwrap();
    child.env("WANT", format!("{} {}", grpc.local_addr().unwrap(), admin.local_addr().unwrap()));
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[tokio::test]
#[ignore = "the child process of a_child_receives_the_sockets_by_name"]
async fn child_of_a_supervisor() {
    let Ok(want) = std::env::var("WANT") else { return };
    let network = TcpNetwork::new(inherited::Inherited::from_env().unwrap());
    let taken = want.split_once(' ').unwrap().0.parse().unwrap();
    let admin = network.bind("admin", &taken).await.unwrap();
    let grpc = network.bind("grpc", &taken).await.unwrap();
    assert_eq!(format!("{} {}", grpc.local(), admin.local()), want);
    assert!(network.bind("grpc", &taken).await.is_err(), "a socket is taken once, then the address counts");
}

#[tokio::test]
async fn a_taken_port_is_a_clear_error() {
    let (_listener, address) = bind("http").await;
    let error = TcpNetwork::default().bind("http", &address).await.err().unwrap();
    assert!(error.to_string().starts_with(&format!("cannot listen on {address} for http: ")), "{error}");
}

/// Over pipes, so that virtual time runs ahead whenever everybody waits.
#[tokio::test(start_paused = true)]
async fn connections_that_stand_still_are_closed() {
    let (silent, half, kept_alive) = (tokio::io::duplex(4096), tokio::io::duplex(4096), tokio::io::duplex(4096));
    let theirs = [silent.1, half.1, kept_alive.1].map(|pipe| Socket::new(pipe, "test"));
    let connections = futures_util::stream::iter(theirs).chain(futures_util::stream::pending());
    let tasks = Tasks::new(Shutdown::new());
    let app = axum::Router::new().route("/", get(async || "hello"));
    http::serve(&tasks, "http", Listener::new("127.0.0.1:80".parse().unwrap(), connections), app);

    let (mut silent, mut half, mut kept_alive) = (silent.0, half.0, kept_alive.0);
    half.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nx-more").await.unwrap();
    kept_alive.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut answer = [0; 15];
    kept_alive.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    for (name, connection) in [("silent", &mut silent), ("half", &mut half), ("kept alive", &mut kept_alive)] {
        let closed = tokio::time::timeout(Duration::from_secs(31), connection.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "{name} is still open");
    }
}
