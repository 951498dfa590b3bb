//! How the ranks of a group, threads of one process, exchange values: each publishes one, all read all of them. Sums over ranks, gathers and
//! scattered sums differ in what a rank publishes and in what it reads.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use crate::EngineError;
use crate::fault::Fault;

/// What the ranks of an instance share, or those of one attention group. Two buffers a rank, used in turn: a rank that fills one for exchange
/// `n + 1` cannot disturb readers of exchange `n`, and by the barrier of `n + 1` all have finished reading `n`, whose buffer `n + 2` will fill.
/// One barrier an exchange is enough.
pub(crate) struct Exchange<T = Vec<f32>> {
    first_rank: u32,
    buffers: Vec<[RwLock<T>; 2]>,
    arrived: AtomicUsize,
    generation: AtomicU64,
    fault: Arc<Fault>,
}

impl<T: Default> Exchange<T> {
    /// Between all ranks of an instance.
    pub(crate) fn new(ranks: u32, fault: Arc<Fault>) -> Self {
        Self::between(0..ranks, fault)
    }

    /// Between ranks that are neighbours.
    pub(crate) fn between(ranks: Range<u32>, fault: Arc<Fault>) -> Self {
        let (first_rank, buffers) = (ranks.start, ranks.map(|_| Default::default()).collect());
        Self { first_rank, buffers, arrived: AtomicUsize::new(0), generation: AtomicU64::new(0), fault }
    }

    /// Sleeps until all ranks are here, or one is lost.
    fn wait(&self) -> Result<(), EngineError> {
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.buffers.len() {
            self.arrived.store(0, Ordering::Relaxed); // published by the next line
            self.generation.store(generation + 1, Ordering::Release);
            self.fault.wake_all();
            return Ok(());
        }
        // A wake-up between the check and `park` is not lost: it leaves a token that lets `park` return at once.
        while self.generation.load(Ordering::Acquire) == generation {
            self.fault.check()?;
            std::thread::park();
        }
        Ok(())
    }
}

/// One rank's end.
pub(crate) struct Link<T = Vec<f32>> {
    rank: usize,
    exchange: Arc<Exchange<T>>,
    turn: usize,
}

impl<T: Default> Link<T> {
    /// `rank` is counted over the whole instance, and is one of the exchange's.
    pub(crate) const fn new(rank: usize, exchange: Arc<Exchange<T>>) -> Self {
        Self { rank, exchange, turn: 0 }
    }

    /// Lets `publish` fill this rank's value, waits for the other ranks, then lets `read` see the values of all, in order of rank. Every rank
    /// of the exchange makes the same sequence of calls.
    ///
    /// # Errors
    /// [`EngineError::RankLost`] if a rank is lost before it has published; `publish`'s own.
    pub(crate) fn share<R>(
        &mut self,
        publish: impl FnOnce(&mut T),
        read: impl FnOnce(&[&T]) -> R,
    ) -> Result<R, EngineError> {
        let lost = || self.exchange.fault.error(self.rank as u32);
        let turn = self.turn % 2;
        self.turn += 1;
        // Locks are never waited for (see `Exchange`); one is poisoned if its rank panicked while it published.
        let own = self.rank - self.exchange.first_rank as usize;
        publish(&mut *self.exchange.buffers[own][turn].write().map_err(|_| lost())?);
        self.exchange.wait()?;
        let guards = self
            .exchange
            .buffers
            .iter()
            .map(|buffers| buffers[turn].read())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| lost())?;
        let values: Vec<&T> = guards.iter().map(|guard| &**guard).collect();
        Ok(read(&values))
    }
}

impl Link<Vec<f32>> {
    /// [`Self::share`] for vectors.
    ///
    /// # Errors
    /// As [`Self::share`].
    pub(crate) fn exchange<R>(
        &mut self,
        publish: impl FnOnce(&mut Vec<f32>),
        read: impl FnOnce(&[&[f32]]) -> R,
    ) -> Result<R, EngineError> {
        self.share(publish, |vectors| {
            let slices: Vec<&[f32]> = vectors.iter().map(|vector| vector.as_slice()).collect();
            read(&slices)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks<T: Send>(ranks: u32, body: impl Fn(u32, Link, &Fault) -> T + Sync) -> Vec<T> {
        let fault = Arc::new(Fault::new(ranks));
        let exchange = Arc::new(Exchange::new(ranks, fault.clone()));
        std::thread::scope(|scope| {
            let spawn = |rank: u32| {
                let (fault, exchange, body) = (fault.clone(), exchange.clone(), &body);
                scope.spawn(move || {
                    fault.register(rank);
                    body(rank, Link::new(rank as usize, exchange), &fault)
                })
            };
            let threads: Vec<_> = (0..ranks).map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics here")).collect()
        })
    }

    #[test]
    fn all_read_what_all_published_many_times() {
        let sums = ranks(4, |rank, mut link, _| {
            (0..2000)
                .map(|i| {
                    let publish = |out: &mut Vec<f32>| *out = vec![(rank * 10 + i % 7) as f32];
                    link.exchange(publish, |all| all.iter().map(|part| part[0]).sum::<f32>()).expect("none is lost")
                })
                .collect::<Vec<_>>()
        });
        for (i, sum) in sums[0].iter().enumerate() {
            assert_eq!(*sum, (60 + 4 * (i % 7)) as f32);
        }
        assert!(sums.iter().all(|rank| *rank == sums[0]));
    }

    #[test]
    fn sleeping_ranks_learn_of_a_lost_one() {
        let results = ranks(4, |rank, mut link, fault| {
            if rank == 2 {
                fault.trip(2, "gave up".into());
                return None;
            }
            Some(link.exchange(|_| {}, |_| ()))
        });
        for result in results.into_iter().flatten() {
            assert!(matches!(result, Err(EngineError::RankLost { rank: 2, .. })), "{result:?}");
        }
    }
}
