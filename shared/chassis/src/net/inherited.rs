//! Sockets bound by a supervisor and handed to a child by the protocol of systemd's socket activation (`LISTEN_FDS`, `LISTEN_FDNAMES`):
//! a taken port is an error of the supervisor, and a child that restarts finds its port, with the connections that wait on it.

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use command_fds::{CommandFdExt, FdMapping};
use listenfd::ListenFd;

/// The first descriptor that a child receives, by the protocol.
const FIRST_FD: i32 = 3;

/// Sockets that this process was started with, by name.
#[derive(Default)]
pub struct Inherited {
    sockets: Mutex<Vec<(String, TcpListener)>>,
}

impl Inherited {
    /// Takes over the sockets that the environment announces; none is the normal case. Call it once, first thing in `main`.
    ///
    /// # Errors
    /// When a descriptor is no listening TCP socket.
    pub fn from_env() -> io::Result<Self> {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut descriptors = ListenFd::from_env();
        let mut sockets = Vec::new();
        for (idx, name) in names.split(':').enumerate().take(descriptors.len()) {
            if let Some(socket) = descriptors.take_tcp_listener(idx)? {
                sockets.push((name.to_owned(), socket));
            }
        }
        Ok(Self { sockets: Mutex::new(sockets) })
    }

    /// The socket of that name, once.
    pub fn take(&self, name: &str) -> Option<TcpListener> {
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        let idx = sockets.iter().position(|(own, _)| own == name)?;
        Some(sockets.swap_remove(idx).1)
    }
}

/// Makes `command` start its child with `sockets`, each by name. Other descriptors of this process stay here.
///
/// # Errors
/// When a socket cannot be duplicated.
pub fn pass_sockets(command: &mut Command, sockets: &[(&str, &TcpListener)]) -> io::Result<()> {
    let mut mappings = Vec::with_capacity(sockets.len());
    for (child_fd, (_, socket)) in (FIRST_FD..).zip(sockets) {
        mappings.push(FdMapping { parent_fd: OwnedFd::from(socket.try_clone()?), child_fd });
    }
    command.fd_mappings(mappings).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
    let names = sockets.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(":");
    command.env("LISTEN_FDS", sockets.len().to_string()).env("LISTEN_FDNAMES", names).env_remove("LISTEN_PID");
    Ok(())
}
