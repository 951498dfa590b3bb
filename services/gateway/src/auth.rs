//! API keys. Keys are long random strings, so a plain digest of one is as good as the key for comparing and worthless
//! to a reader.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::config::ApiKeyConfig;
use crate::error::ApiError;

/// SHA-256 of a key; written as 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyDigest([u8; 32]);

impl KeyDigest {
    /// Of the key itself.
    #[must_use]
    pub fn of(key: &str) -> Self {
        Self(Sha256::digest(key).into())
    }

    fn parse(text: &str) -> Option<Self> {
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let mut digest = [0; 32];
        for (byte, digits) in digest.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        Some(Self(digest))
    }
}

impl fmt::Display for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyDigest({self})")
    }
}

impl Serialize for KeyDigest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for KeyDigest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom("is no SHA-256: 64 hexadecimal digits are expected"))
    }
}

/// The keys that may come in.
#[derive(Debug, Clone, Default)]
pub struct Keys(Vec<ApiKeyConfig>);

impl Keys {
    /// These and no others; none at all lets everybody in.
    #[must_use]
    pub fn new(keys: Vec<ApiKeyConfig>) -> Self {
        Self(keys)
    }

    /// The owner of the key in an `Authorization` header; `None` if no keys are configured. Takes the same time
    /// whichever key it is and however much of it is right.
    ///
    /// # Errors
    /// 401.
    pub fn admit(&self, authorization: Option<&str>) -> Result<Option<&str>, ApiError> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let Some(key) = authorization.and_then(bearer) else {
            let message = "an API key is needed: send it as `Authorization: Bearer KEY`";
            return Err(ApiError::Unauthorized { message });
        };
        let digest = KeyDigest::of(key);
        let mut owner = None;
        for known in &self.0 {
            if bool::from(known.sha256.0.ct_eq(&digest.0)) {
                owner = Some(known.name.as_str());
            }
        }
        owner.map(Some).ok_or(ApiError::Unauthorized { message: "the API key is not known" })
    }
}

fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, key) = authorization.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_keys_come_in_and_their_owner_is_told() {
        let key = |name: &str, key: &str| ApiKeyConfig { name: name.into(), sha256: KeyDigest::of(key) };
        let keys = Keys::new(vec![key("alice", "sk-a"), key("bob", "sk-b")]);
        assert_eq!(keys.admit(Some("Bearer sk-b")), Ok(Some("bob")));
        assert_eq!(keys.admit(Some("bearer sk-a")), Ok(Some("alice")));
        for refused in [None, Some(""), Some("sk-a"), Some("Basic sk-a"), Some("Bearer sk-"), Some("Bearer ")] {
            assert_eq!(keys.admit(refused).unwrap_err().status(), 401, "{refused:?}");
        }
        assert_eq!(Keys::default().admit(None), Ok(None));
    }

    #[test]
    fn digests_are_read_and_written() {
        let digest = KeyDigest::of("sk-a");
        assert_eq!(KeyDigest::parse(&digest.to_string()), Some(digest));
        for wrong in ["", "00", &"g".repeat(64), &"+0".repeat(32)] {
            assert_eq!(KeyDigest::parse(wrong), None);
        }
    }
}
