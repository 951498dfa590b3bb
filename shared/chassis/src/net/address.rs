//! `host:port`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// A host (name, IPv4 or IPv6) and a port; written `host:port` or `[v6]:port`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// Name or IP address, without brackets.
    pub host: String,
    /// Port; 0 asks for any when binding.
    pub port: u16,
}

impl Address {
    /// Puts the two together.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// Whether only processes on this host can connect.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::new(address.ip().to_string(), address.port())
    }
}

/// A text that is no `host:port`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no address, expected host:port")]
pub struct InvalidAddress {
    /// As given.
    pub text: String,
}

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidAddress { text: text.to_owned() };
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let port = port.parse().map_err(|_| invalid())?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host_is_valid = match bracketed {
            Some(host) => host.parse::<std::net::Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte)),
        };
        if host_is_valid { Ok(Self::new(bracketed.unwrap_or(host), port)) } else { Err(invalid()) }
    }
}

impl serde::Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Address {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, host, port) in
            [("127.0.0.1:80", "127.0.0.1", 80), ("decode-0:9200", "decode-0", 9200), ("[::1]:0", "::1", 0)]
        {
            let address: Address = text.parse().unwrap();
            assert_eq!(address, Address::new(host, port));
            assert_eq!(address.to_string(), text);
        }
        for text in ["", "host", "host:", ":80", "host:70000", "::1:80", "http://host:80", "[host]:80"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
