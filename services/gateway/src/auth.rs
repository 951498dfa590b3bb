//! API keys. Keys are long random strings, so a plain digest of one is as good as the key for comparing and worthless
//! to a reader.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::caller::Caller;
use crate::config::{ApiKeyConfig, KeyLimits};
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
#[derive(Debug)]
pub struct Keys {
    known: Vec<KnownKey>,
    /// All who come, if no keys are known.
    everybody: Arc<Caller>,
}

#[derive(Debug)]
struct KnownKey {
    digest: KeyDigest,
    suspended: bool,
    owner: Arc<Caller>,
}

impl Keys {
    /// These and no others; none at all lets everybody in. `per_key` is what a key may use that says nothing else.
    #[must_use]
    pub fn new(keys: &[ApiKeyConfig], per_key: KeyLimits, now: Instant) -> Self {
        let mut known: Vec<KnownKey> = Vec::new();
        for key in keys {
            let of_same_name = known.iter().find(|earlier| earlier.owner.name() == key.name);
            let owner = of_same_name.map_or_else(
                || Arc::new(Caller::new(key.name.clone(), key.limits.or(per_key), now)),
                |earlier| Arc::clone(&earlier.owner),
            );
            known.push(KnownKey { digest: key.sha256.clone(), suspended: key.suspended, owner });
        }
        Self { known, everybody: Arc::new(Caller::everybody(per_key, now)) }
    }

    /// The owner of the key in an `Authorization` header. Takes the same time whichever key it is and however much of
    /// it is right.
    ///
    /// # Errors
    /// 401, and 403 for a key that is suspended.
    pub fn admit(&self, authorization: Option<&str>) -> Result<&Arc<Caller>, ApiError> {
        if self.known.is_empty() {
            return Ok(&self.everybody);
        }
        let Some(key) = authorization.and_then(bearer) else {
            let message = "an API key is needed: send it as `Authorization: Bearer KEY`";
            return Err(ApiError::Unauthorized { message });
        };
        let digest = KeyDigest::of(key);
        let mut found = None;
        for known in &self.known {
            if bool::from(known.digest.0.ct_eq(&digest.0)) {
                found = Some(known);
            }
        }
        match found {
            None => Err(ApiError::Unauthorized { message: "the API key is not known" }),
            Some(key) if key.suspended => Err(ApiError::Forbidden { message: "the API key is suspended" }),
            Some(key) => Ok(&key.owner),
        }
    }
}

fn bearer(authorization: &str) -> Option<&str> {
    let (scheme, key) = authorization.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, key: &str) -> ApiKeyConfig {
        ApiKeyConfig {
            name: name.into(),
            sha256: KeyDigest::of(key),
            suspended: name == "eve",
            limits: KeyLimits::default(),
        }
    }

    fn keys(keys: &[ApiKeyConfig]) -> Keys {
        Keys::new(keys, KeyLimits::default(), Instant::now())
    }

    #[test]
    fn only_known_keys_come_in_and_their_owner_is_told() {
        let keys = keys(&[key("alice", "sk-a"), key("bob", "sk-b"), key("eve", "sk-e")]);
        assert_eq!(keys.admit(Some("Bearer sk-b")).unwrap().name(), "bob");
        assert_eq!(keys.admit(Some("bearer sk-a")).unwrap().name(), "alice");
        for refused in [None, Some(""), Some("sk-a"), Some("Basic sk-a"), Some("Bearer sk-"), Some("Bearer ")] {
            assert_eq!(keys.admit(refused).unwrap_err().status(), 401, "{refused:?}");
        }
        assert_eq!(keys.admit(Some("Bearer sk-e")).unwrap_err().status(), 403);
    }

    #[test]
    fn without_keys_everybody_is_one_caller() {
        let keys = keys(&[]);
        assert!(Arc::ptr_eq(keys.admit(None).unwrap(), keys.admit(Some("Bearer sk-x")).unwrap()));
    }

    #[test]
    fn keys_of_one_name_are_one_caller() {
        let keys = keys(&[key("alice", "old"), key("bob", "sk-b"), key("alice", "new")]);
        let caller = |key: &str| keys.admit(Some(key)).unwrap();
        assert!(Arc::ptr_eq(caller("Bearer old"), caller("Bearer new")));
        assert!(!Arc::ptr_eq(caller("Bearer old"), caller("Bearer sk-b")));
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
