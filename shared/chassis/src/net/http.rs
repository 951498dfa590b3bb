//! Serves an axum app on a [`Listener`]. Answers may stream for as long as they like (server-sent events); a drain lets them finish.

use std::pin::pin;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio_util::sync::CancellationToken;

use super::first_byte::expect_first_byte;
use super::{FIRST_BYTE_TIMEOUT, Listener, Socket};
use crate::admin::Admin;
use crate::tasks::Tasks;

/// A head that has begun must be complete within this time; a kept-alive connection must be used again within it.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves `app` until the drain begins; open answers are work that the drain waits for. HTTP/1.1 and HTTP/2.
pub fn serve(tasks: &Tasks, name: &'static str, mut listener: Listener, app: axum::Router) {
    let tasks = tasks.clone();
    let drain = tasks.shutdown().drain().clone();
    tasks.clone().spawn_critical(name, async move {
        while let Some(Some(socket)) = drain.run_until_cancelled(listener.accept()).await {
            tasks.spawn(name, connection(socket, app.clone(), drain.clone()));
        }
        Ok::<_, std::convert::Infallible>(())
    });
}

/// Serves the admin app as long as there is any work, so through a drain as well.
pub fn serve_admin(tasks: &Tasks, mut listener: Listener, admin: Admin) {
    let app = admin.app();
    let tasks = tasks.clone();
    tasks.clone().spawn_background("admin", async move {
        while let Some(socket) = listener.accept().await {
            tasks.spawn_background("admin", connection(socket, app.clone(), CancellationToken::new()));
        }
    });
}

async fn connection(socket: Socket, app: axum::Router, drain: CancellationToken) {
    let peer = socket.peer().to_owned();
    let socket = expect_first_byte(socket, FIRST_BYTE_TIMEOUT);
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(super::grpc::SERVER_KEEP_ALIVE);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(socket), TowerToHyperService::new(app)));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = drain.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    // A client that hangs up mid-request is everyday life.
    if let Err(error) = ended {
        tracing::debug!(client = peer, error, "connection ended early");
    }
}
