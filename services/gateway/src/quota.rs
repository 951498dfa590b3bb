//! A token bucket. Its own and not a crate's, because a request's output is known only once it is written: a bucket here can be charged
//! afterwards and go into debt, which then delays the next request. Clockless.

use std::time::{Duration, Instant};

/// An amount per minute. A full bucket holds the amount of one minute; it refills steadily.
#[derive(Debug, Clone)]
pub struct Bucket {
    capacity: f64,
    /// Below 0: a debt.
    level: f64,
    as_of: Instant,
}

/// Why a bucket gives nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Not yet, but after this time if nobody else takes anything.
    Later(Duration),
    /// Never: more is asked for than the bucket can hold.
    Never,
}

impl Bucket {
    /// A full bucket.
    #[must_use]
    pub fn per_minute(amount: u32, now: Instant) -> Self {
        Self { capacity: f64::from(amount), level: f64::from(amount), as_of: now }
    }

    /// Takes `amount` if it is there, all or nothing.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn take(&mut self, now: Instant, amount: u32) -> Result<(), Refusal> {
        let amount = f64::from(amount);
        if amount > self.capacity {
            return Err(Refusal::Never);
        }
        self.refill(now);
        let missing = amount - self.level;
        if missing > 0.0 {
            return Err(Refusal::Later(Duration::from_secs_f64(missing * 60.0 / self.capacity)));
        }
        self.level -= amount;
        Ok(())
    }

    /// Takes `amount` whether it is there or not.
    pub fn charge(&mut self, now: Instant, amount: u32) {
        self.refill(now);
        self.level -= f64::from(amount);
    }

    fn refill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.as_of).as_secs_f64();
        self.level = (self.level + elapsed * self.capacity / 60.0).min(self.capacity);
        self.as_of = self.as_of.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_what_it_holds_and_refills_steadily() {
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let mut bucket = Bucket::per_minute(60, start);
        assert_eq!(bucket.take(start, 50), Ok(()));
        assert_eq!(bucket.take(start, 20), Err(Refusal::Later(Duration::from_secs(10))));
        assert_eq!(bucket.take(at(10), 20), Ok(()));
        assert_eq!(bucket.take(at(10), 1), Err(Refusal::Later(Duration::from_secs(1))));
        assert_eq!(bucket.take(at(3600), 60), Ok(()), "it holds no more than a minute's worth");
        assert_eq!(bucket.take(at(3600), 1), Err(Refusal::Later(Duration::from_secs(1))));
        assert_eq!(bucket.take(at(7200), 61), Err(Refusal::Never));
    }

    #[test]
    fn a_debt_must_be_worked_off_first() {
        let start = Instant::now();
        let mut bucket = Bucket::per_minute(60, start);
        bucket.charge(start, 90);
        assert_eq!(bucket.take(start, 1), Err(Refusal::Later(Duration::from_secs(31))));
        assert_eq!(bucket.take(start + Duration::from_secs(31), 1), Ok(()));
    }

    #[test]
    fn a_clock_that_stands_still_or_goes_back_gives_nothing() {
        let start = Instant::now() + Duration::from_secs(60);
        let mut bucket = Bucket::per_minute(1, start);
        assert_eq!(bucket.take(start, 1), Ok(()));
        assert!(bucket.take(start - Duration::from_secs(30), 1).is_err());
        assert_eq!(bucket.take(start + Duration::from_secs(60), 1), Ok(()));
    }
}
