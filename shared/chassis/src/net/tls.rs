//! TLS in front of a [`Listener`]. The crypto provider is ring, named here and nowhere else: nothing depends on what a process has installed.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream::StreamExt;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

use super::{Listener, Socket};
use crate::tasks::Tasks;

/// How often the files are looked at. Certificates live for weeks, and a tool that renews them does so days ahead.
const WATCH_INTERVAL: Duration = Duration::from_secs(10);

/// Whose certificate is shown to clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// PEM file: the server's certificate and then those that lead to its root. Read again when it changes.
    pub certificate: PathBuf,
    /// PEM file: the certificate's private key.
    pub key: PathBuf,
}

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {file}: {cause}", file = file.display())]
    Read {
        /// Which.
        file: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// A file is not the PEM that it should be.
    #[error("{file}: {cause}", file = file.display())]
    Pem {
        /// Which.
        file: PathBuf,
        /// What is wrong.
        cause: pem::Error,
    },
    /// Certificate and key do not belong together, or are of a kind that is not supported.
    #[error("{file}: {cause}", file = file.display())]
    Certificate {
        /// The certificate.
        file: PathBuf,
        /// What is wrong.
        cause: rustls::Error,
    },
}

/// A server's side of TLS.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
}

impl Tls {
    /// Loads the files, and again whenever they change: a new pair that cannot be used is logged, and the old one stays. Offers HTTP/2 and
    /// HTTP/1.1.
    ///
    /// # Errors
    /// As [`TlsError`] says.
    pub async fn start(tasks: &Tasks, config: TlsConfig) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let files = PemFiles::read(&config).await?;
        let current = Arc::new(Current(RwLock::new(files.certified(&config, &provider)?)));
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("ring has the cipher suites of TLS 1.2 and 1.3")
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&current) as Arc<dyn ResolvesServerCert>);
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        tasks.spawn_background("certificate watch", watch(config, files, current, provider));
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(server)) })
    }

    /// The listener's connections, encrypted. The handshake is part of the first read, so one client that is slow with it holds up nobody.
    #[must_use]
    pub fn secure(&self, listener: Listener) -> Listener {
        let acceptor = self.acceptor.clone();
        let local = listener.local().clone();
        Listener::new(
            local,
            listener.map(move |socket| {
                let peer = socket.peer().to_owned();
                Socket::new(TlsSocket::Handshake(Box::new(acceptor.accept(socket))), peer)
            }),
        )
    }
}

/// The contents of the two files.
#[derive(PartialEq)]
struct PemFiles {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl PemFiles {
    async fn read(config: &TlsConfig) -> Result<Self, TlsError> {
        let read = async |file: &Path| {
            tokio::fs::read(file).await.map_err(|cause| TlsError::Read { file: file.to_path_buf(), cause })
        };
        Ok(Self { certificate: read(&config.certificate).await?, key: read(&config.key).await? })
    }

    fn certified(&self, config: &TlsConfig, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, TlsError> {
        let in_file = |file: &Path, cause| TlsError::Pem { file: file.to_path_buf(), cause };
        let chain = CertificateDer::pem_slice_iter(&self.certificate)
            .collect::<Result<Vec<_>, _>>()
            .and_then(|chain| if chain.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(chain) })
            .map_err(|cause| in_file(&config.certificate, cause))?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|cause| in_file(&config.key, cause))?;
        let certified = CertifiedKey::from_der(chain, key, provider)
            .map_err(|cause| TlsError::Certificate { file: config.certificate.clone(), cause })?;
        Ok(Arc::new(certified))
    }
}

/// The certificate of this moment.
#[derive(Debug)]
struct Current(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

async fn watch(config: TlsConfig, mut loaded: PemFiles, current: Arc<Current>, provider: Arc<CryptoProvider>) {
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        let found = match PemFiles::read(&config).await {
            Ok(found) if found == loaded => continue,
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(%error, "certificate cannot be read again");
                continue;
            }
        };
        // Between the writing of one file and of the other they do not fit: the next round finds both.
        match found.certified(&config, &provider) {
            Ok(certified) => {
                *current.0.write().unwrap_or_else(PoisonError::into_inner) = certified;
                loaded = found;
                tracing::info!(certificate = %config.certificate.display(), "new certificate");
            }
            Err(error) => tracing::warn!(%error, "new certificate cannot be used, the old one stays"),
        }
    }
}

enum TlsSocket {
    Handshake(Box<Accept<Socket>>),
    Open(Box<TlsStream<Socket>>),
    Failed,
}

impl TlsSocket {
    /// The stream, once the handshake is over.
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Pin<&mut TlsStream<Socket>>>> {
        if let Self::Handshake(accept) = self {
            *self = match ready!(Pin::new(accept.as_mut()).poll(cx)) {
                Ok(stream) => Self::Open(Box::new(stream)),
                Err(error) => {
                    *self = Self::Failed;
                    return Poll::Ready(Err(error));
                }
            };
        }
        Poll::Ready(match self {
            Self::Open(stream) => Ok(Pin::new(stream.as_mut())),
            Self::Handshake(_) | Self::Failed => Err(io::ErrorKind::NotConnected.into()),
        })
    }
}

impl AsyncRead for TlsSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        ready!(self.get_mut().poll_open(cx))?.poll_read(cx, buf)
    }
}

impl AsyncWrite for TlsSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.get_mut().poll_open(cx))?.poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Open(stream) => Pin::new(stream.as_mut()).poll_flush(cx),
            // Nothing was written yet.
            Self::Handshake(_) | Self::Failed => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Open(stream) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            // A client that has not shaken hands is owed no goodbye.
            Self::Handshake(_) | Self::Failed => Poll::Ready(Ok(())),
        }
    }
}
