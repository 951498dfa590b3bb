//! Who sends a request, and how much of the server it may have.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use types::CacheSalt;

use crate::config::KeyLimits;
use crate::error::ApiError;
use crate::quota::{Bucket, Refusal};

/// When a refused caller should come again: its own requests end at about this pace.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The owner of a key, or all who come without one where no keys are configured.
#[derive(Debug)]
pub struct Caller {
    name: String,
    cache_salt: Option<CacheSalt>,
    limits: KeyLimits,
    requests: Option<Mutex<Bucket>>,
    tokens: Option<Mutex<Bucket>>,
    slots: Option<Arc<Semaphore>>,
}

impl Caller {
    /// All who come without a key. They share cached prompts with each other, and with those who call the router themselves without a salt.
    #[must_use]
    pub fn everybody(limits: KeyLimits, now: Instant) -> Self {
        Self { cache_salt: None, ..Self::new("everybody".into(), limits, now) }
    }

    /// The owner of a key, who has used nothing yet.
    #[must_use]
    pub fn new(name: String, limits: KeyLimits, now: Instant) -> Self {
        let bucket = |per_minute: Option<u32>| per_minute.map(|amount| Mutex::new(Bucket::per_minute(amount, now)));
        Self {
            // A name may be longer than a salt.
            cache_salt: Some(CacheSalt::new(&Sha256::digest(&name)).expect("a digest is 32 bytes long")),
            name,
            limits,
            requests: bucket(limits.requests_per_minute),
            tokens: bucket(limits.tokens_per_minute),
            slots: limits.concurrent_requests_max.map(|max| Arc::new(Semaphore::new(max as usize))),
        }
    }

    /// The name in logs, and of what is kept for this caller.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Keeps apart whose cached prompts are reused by whom: how long a prompt takes must not tell one owner what another has asked.
    #[must_use]
    pub fn cache_salt(&self) -> Option<&CacheSalt> {
        self.cache_salt.as_ref()
    }

    /// Counts one request in. The permit, if there is a limit, is to be held as long as the request is answered.
    ///
    /// # Errors
    /// 429.
    pub fn begin_request(&self, now: Instant) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let permit = match &self.slots {
            None => None,
            Some(slots) => Some(Arc::clone(slots).try_acquire_owned().map_err(|_| ApiError::Overloaded {
                message: format!(
                    "at most {} of this key's requests are answered at once",
                    self.limits.concurrent_requests_max.unwrap_or_default()
                ),
                retry_after: RETRY_AFTER,
            })?),
        };
        if let Some(bucket) = &self.requests {
            locked(bucket).take(now, 1).map_err(|refusal| {
                let per_minute = self.limits.requests_per_minute.unwrap_or_default();
                too_fast(refusal, format!("this key may send {per_minute} requests a minute"))
            })?;
        }
        Ok(permit)
    }

    /// Takes the tokens of a prompt that came in field `param`.
    ///
    /// # Errors
    /// 429; 400 if a minute's worth is not enough for it.
    pub fn spend_prompt(&self, now: Instant, tokens: u32, param: &str) -> Result<(), ApiError> {
        let Some(bucket) = &self.tokens else { return Ok(()) };
        locked(bucket).take(now, tokens).map_err(|refusal| {
            let per_minute = self.limits.tokens_per_minute.unwrap_or_default();
            let allowed = format!("this key may use {per_minute} tokens a minute");
            match refusal {
                Refusal::Never => ApiError::InvalidRequest {
                    message: format!("the prompt has {tokens} tokens, {allowed}"),
                    param: Some(param.into()),
                    code: Some("rate_limit_exceeded"),
                },
                later @ Refusal::Later(_) => too_fast(later, allowed),
            }
        })
    }

    /// Counts tokens that were generated. What exceeds the limit delays the next request.
    pub fn charge_output(&self, now: Instant, tokens: u32) {
        if let Some(bucket) = &self.tokens {
            locked(bucket).charge(now, tokens);
        }
    }
}

fn locked(bucket: &Mutex<Bucket>) -> std::sync::MutexGuard<'_, Bucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
}

fn too_fast(refusal: Refusal, allowed: String) -> ApiError {
    let retry_after = match refusal {
        Refusal::Later(wait) => wait,
        Refusal::Never => RETRY_AFTER,
    };
    ApiError::Overloaded { message: allowed, retry_after }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(limits: KeyLimits) -> (Caller, Instant) {
        let now = Instant::now();
        (Caller::new("alice".into(), limits, now), now)
    }

    #[test]
    fn owners_share_cached_prompts_with_nobody_but_themselves() {
        let salt = |name: &str| Caller::new(name.into(), KeyLimits::default(), Instant::now()).cache_salt().cloned();
        assert!(salt("alice").is_some());
        assert_eq!(salt("alice"), salt("alice"), "at another gateway too");
        assert_ne!(salt("alice"), salt("bob"));
        assert_ne!(salt(&"a".repeat(200)), salt(&"a".repeat(201)));
        assert_eq!(Caller::everybody(KeyLimits::default(), Instant::now()).cache_salt(), None);
    }

    #[test]
    fn requests_are_counted_by_minute_and_at_once() {
        let (caller, now) = caller(KeyLimits {
            requests_per_minute: Some(2),
            concurrent_requests_max: Some(1),
            ..KeyLimits::default()
        });
        let first = caller.begin_request(now).unwrap();
        assert!(first.is_some());
        let error = caller.begin_request(now).unwrap_err();
        assert_eq!(error.to_string(), "at most 1 of this key's requests are answered at once");
        drop(first);
        drop(caller.begin_request(now).unwrap());
        let error = caller.begin_request(now).unwrap_err();
        assert_eq!((error.status().as_u16(), error.retry_after_secs()), (429, Some(30)));
        assert!(caller.begin_request(now + Duration::from_secs(30)).is_ok());
    }

    #[test]
    fn output_counts_against_the_next_prompt() {
        let (caller, now) = caller(KeyLimits { tokens_per_minute: Some(600), ..KeyLimits::default() });
        caller.spend_prompt(now, 500, "messages").unwrap();
        caller.charge_output(now, 200);
        let error = caller.spend_prompt(now, 100, "messages").unwrap_err();
        assert_eq!((error.status().as_u16(), error.retry_after_secs()), (429, Some(20)));
        let error = caller.spend_prompt(now, 601, "messages").unwrap_err();
        assert_eq!((error.status().as_u16(), error.object().param.as_deref()), (400, Some("messages")));
        assert!(caller.spend_prompt(now + Duration::from_secs(20), 100, "messages").is_ok());
    }

    #[test]
    fn without_limits_nothing_is_refused() {
        let (caller, now) = caller(KeyLimits::default());
        for _ in 0..1000 {
            assert!(caller.begin_request(now).unwrap().is_none());
            caller.spend_prompt(now, u32::MAX, "messages").unwrap();
        }
    }
}
