//! The workers that are known and alive, which of them fit each other, and how many requests each has.

mod links;

use std::collections::HashMap;
use std::fmt;

use chassis::Address;
use tokio_util::sync::CancellationToken;
use types::{ModelFingerprint, PeerId, Role, TokenId, WorkerReport, WorkerState};

use self::links::Link;
pub use self::links::LinkOrder;
use crate::affinity::{Affinity, Beginnings};
use crate::placement::{self, DecodeCandidate, NoPlace, PrefillCandidate};

/// What makes two workers compute the same tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelKey {
    /// Model and vocabulary.
    pub fingerprint: ModelFingerprint,
    /// Configuration and weights.
    pub weights_fingerprint: String,
}

impl fmt::Display for ModelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, weights {:.12}", self.fingerprint, self.weights_fingerprint)
    }
}

/// One worker in one of its lives, as the fleet numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkerNo(u64);

#[cfg(test)]
impl WorkerNo {
    pub(crate) const fn for_test(no: u64) -> Self {
        Self(no)
    }
}

/// What the fleet can serve now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// The model.
    pub model: ModelKey,
    /// Pairs of workers, both ready, that fit each other and are linked.
    pub ready_pairs: u32,
    /// Most positions that each of these workers can hold.
    pub max_context_tokens: u32,
    /// Tokens that end an answer by the model's own convention.
    pub eos_token_ids: Vec<TokenId>,
}

/// What a request needs of its workers.
#[derive(Debug, Clone)]
pub struct Need {
    /// Same weights for every attempt.
    pub model: ModelKey,
    /// Tokens of the context.
    pub prompt_tokens: u64,
    /// By which a prefill worker is found that has computed some of them.
    pub beginnings: Beginnings,
    /// Workers that failed it before.
    pub avoid: Vec<PeerId>,
    /// Whether a worker had no room for it since it last had its reservation: it then asks a decode worker alone, so that smaller ones
    /// do not take its room over and over.
    pub was_refused: bool,
}

/// A worker's place for one request. To be given back by [`Fleet::release`].
#[derive(Debug)]
pub struct Assigned<L> {
    /// Whose.
    pub worker: WorkerNo,
    /// Name and incarnation.
    pub peer: PeerId,
    /// How to reach it.
    pub link: L,
    /// Cancelled when the worker is given up.
    pub gone: CancellationToken,
    /// Counted against the worker.
    pub prompt_tokens: u64,
    /// Whether the worker refused the request, so that giving this place back makes no room.
    refused: bool,
    /// Whether nobody else is sent to the worker until it has answered.
    asks_alone: bool,
}

/// A prefill and a decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PairNo {
    prefill: WorkerNo,
    decode: WorkerNo,
}

/// Why a report is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// Config and worker disagree.
    #[error("{peer} at {address} is a {is} worker, the config lists it under {listed}")]
    WrongRole {
        /// Who.
        peer: PeerId,
        /// Where.
        address: Address,
        /// By its own word.
        is: Role,
        /// By the config.
        listed: Role,
    },
    /// One process behind two addresses would be counted twice.
    #[error("{peer} at {address} is known at {known} already")]
    Duplicate {
        /// Who.
        peer: PeerId,
        /// Where it was found again.
        address: Address,
        /// Where it was found first.
        known: Address,
    },
}

#[derive(Debug)]
struct Worker<L> {
    no: WorkerNo,
    address: Address,
    link: L,
    model: ModelKey,
    report: WorkerReport,
    gone: CancellationToken,
    /// Requests of this router that have a place here, and their prompt tokens.
    permits: u32,
    permit_tokens: u64,
    /// It refused a request; believed until its next report or until another request gives its place back.
    is_full: bool,
    /// It has not computed all of some prompt: what it was sent before is worth something there.
    reuses: bool,
    /// When it was given a request last, as a count of them.
    last_given: u64,
    /// A request that was refused before is asking again, alone.
    is_asked_again: bool,
}

impl<L> Worker<L> {
    fn is(&self, role: Role) -> bool {
        self.report.description.role == role
    }

    fn is_ready(&self) -> bool {
        self.report.state == WorkerState::Ready
    }
}

/// All known workers. `L` is what the caller needs to reach one.
#[derive(Debug)]
pub struct Fleet<L> {
    /// By name, so that equal loads are broken the same way each time.
    workers: Vec<Worker<L>>,
    /// Pairs that fit each other.
    links: HashMap<PairNo, Link>,
    next_no: u64,
    /// Requests that workers were given so far, once for each side.
    given: u64,
    prefills_per_worker_max: u32,
    /// `None`: workers compute every prompt from its start.
    affinity: Option<Affinity>,
}

impl<L: Clone> Fleet<L> {
    /// No workers yet. With `prefix_affinity` a prompt goes rather to who has computed its beginning before.
    #[must_use]
    pub fn new(prefills_per_worker_max: u32, prefix_affinity: bool) -> Self {
        let affinity = prefix_affinity.then(Affinity::default);
        Self { workers: Vec::new(), links: HashMap::new(), next_no: 0, given: 0, prefills_per_worker_max, affinity }
    }

    /// A heartbeat from `address`. Another incarnation than before at that address ends the earlier one.
    ///
    /// # Errors
    /// When the worker is not what the config says, or known by another address.
    pub fn on_report(
        &mut self,
        listed: Role,
        address: &Address,
        link: &L,
        report: WorkerReport,
    ) -> Result<(), ReportError> {
        let peer = report.description.peer.clone();
        if self
            .workers
            .iter()
            .any(|worker| worker.address == *address && worker.report.description != report.description)
        {
            self.on_lost(address, "another worker answers at its address");
        }
        if let Some(worker) = self.workers.iter_mut().find(|worker| worker.address == *address) {
            if worker.report.state != report.state {
                tracing::info!(worker = %peer, state = report.state.name(), "worker changed its state");
            }
            worker.report = report;
            worker.is_full = false;
            return Ok(());
        }
        let is = report.description.role;
        if is != listed {
            return Err(ReportError::WrongRole { peer, address: address.clone(), is, listed });
        }
        if let Some(known) = self.workers.iter().find(|worker| worker.report.description.peer == peer) {
            return Err(ReportError::Duplicate { peer, address: address.clone(), known: known.address.clone() });
        }
        self.add(address, link, report);
        Ok(())
    }

    fn add(&mut self, address: &Address, link: &L, report: WorkerReport) {
        let description = &report.description;
        let model = ModelKey {
            fingerprint: description.fingerprint.clone(),
            weights_fingerprint: description.weights_fingerprint.clone(),
        };
        tracing::info!(
            worker = %description.peer, role = %description.role, %address, %model, layout = %description.parallel,
            state = report.state.name(), "worker found"
        );
        let worker = Worker {
            no: WorkerNo(self.next_no),
            address: address.clone(),
            link: link.clone(),
            model,
            report,
            gone: CancellationToken::new(),
            permits: 0,
            permit_tokens: 0,
            is_full: false,
            reuses: false,
            last_given: 0,
            is_asked_again: false,
        };
        self.next_no += 1;
        for other in &self.workers {
            let (prefill, decode) = match worker.report.description.role {
                Role::Prefill if other.is(Role::Decode) => (&worker, other),
                Role::Decode if other.is(Role::Prefill) => (other, &worker),
                _ => continue,
            };
            match links::mismatch(prefill, decode) {
                None => {
                    self.links.insert(PairNo { prefill: prefill.no, decode: decode.no }, Link::Unlinked);
                }
                Some(field) => tracing::warn!(
                    prefill = %prefill.report.description.peer, decode = %decode.report.description.peer, field,
                    "workers do not fit each other and are never paired"
                ),
            }
        }
        let name = |worker: &Worker<L>| worker.report.description.peer.clone();
        let idx = self.workers.partition_point(|other| name(other) < name(&worker));
        self.workers.insert(idx, worker);
    }

    /// The worker at `address` is dead, or as good as that: its requests hear of it by [`Assigned::gone`].
    pub fn on_lost(&mut self, address: &Address, reason: &str) {
        let Some(idx) = self.workers.iter().position(|worker| worker.address == *address) else { return };
        let worker = self.workers.remove(idx);
        self.links.retain(|pair, _| pair.prefill != worker.no && pair.decode != worker.no);
        if let Some(affinity) = &mut self.affinity {
            affinity.forget(worker.no);
        }
        worker.gone.cancel();
        tracing::warn!(worker = %worker.report.description.peer, %address, requests = worker.permits, reason, "worker lost");
    }

    fn ready(&self, role: Role) -> impl Iterator<Item = &Worker<L>> {
        self.workers.iter().filter(move |worker| worker.is(role) && worker.is_ready())
    }

    /// The model with the most pairs that are ready, if any pair is. Equal numbers: the one whose prefill worker is named first.
    #[must_use]
    pub fn served(&self) -> Option<Served> {
        let mut best: Option<(&ModelKey, u32)> = None;
        for prefill in self.ready(Role::Prefill) {
            let num_pairs = self.ready_pairs(&prefill.model);
            if num_pairs > best.map_or(0, |(_, most)| most) {
                best = Some((&prefill.model, num_pairs));
            }
        }
        let (model, ready_pairs) = best?;
        let of_model = || self.workers.iter().filter(|worker| worker.is_ready() && worker.model == *model);
        let max_context_tokens = of_model().map(|worker| worker.report.description.max_context_tokens).min()?;
        let eos_token_ids = of_model().next()?.report.description.eos_token_ids.clone();
        Some(Served { model: model.clone(), ready_pairs, max_context_tokens, eos_token_ids })
    }

    /// Pairs, linked and both workers ready, that compute this model.
    #[must_use]
    pub fn ready_pairs(&self, model: &ModelKey) -> u32 {
        let pairs = self
            .ready(Role::Prefill)
            .flat_map(|prefill| self.ready(Role::Decode).filter(move |decode| self.are_linked(prefill, decode)));
        pairs.filter(|decode| decode.model == *model).count() as u32
    }

    /// Takes a place on each side of the pair that would have the first token soonest.
    ///
    /// # Errors
    /// When there is no pair, or none with room.
    pub fn place(&mut self, need: &Need) -> Result<(Assigned<L>, Assigned<L>), NoPlace> {
        let (prefill, own_tokens, decode) = {
            let of_role = |role| -> Vec<_> { self.ready(role).filter(|worker| worker.model == need.model).collect() };
            let (prefills, decodes): (Vec<&Worker<L>>, Vec<&Worker<L>>) =
                (of_role(Role::Prefill), of_role(Role::Decode));
            let prefill_candidates: Vec<_> =
                prefills.iter().map(|worker| self.prefill_candidate(worker, need)).collect();
            let decode_candidates: Vec<_> = decodes.iter().map(|worker| decode_candidate(worker)).collect();
            let linked = |p: usize, d: usize| self.are_linked(prefills[p], decodes[d]);
            let (p, d) = placement::choose(&prefill_candidates, &decode_candidates, linked, &need.avoid)?;
            (prefills[p].no, prefill_candidates[p].own_prompt_tokens, decodes[d].no)
        };
        if let Some(affinity) = &mut self.affinity {
            affinity.note(&need.beginnings, prefill);
        }
        // Prefill takes prompts in turn whatever their size: there nobody is overtaken.
        Ok((self.assign(prefill, own_tokens, false), self.assign(decode, need.prompt_tokens, need.was_refused)))
    }

    fn prefill_candidate<'a>(&self, worker: &'a Worker<L>, need: &Need) -> PrefillCandidate<'a> {
        let affinity = self.affinity.as_ref().filter(|_| worker.reuses);
        let known = affinity.map_or(0, |affinity| affinity.known_tokens(&need.beginnings, worker.no));
        PrefillCandidate {
            own_prompt_tokens: need.prompt_tokens.saturating_sub(known),
            last_given: worker.last_given,
            peer: &worker.report.description.peer,
            pending_prompt_tokens: worker.permit_tokens.max(worker.report.load.pending_prompt_tokens),
            has_room: !worker.is_full && worker.permits < self.prefills_per_worker_max,
        }
    }

    fn assign(&mut self, no: WorkerNo, prompt_tokens: u64, asks_alone: bool) -> Assigned<L> {
        self.given += 1;
        let given = self.given;
        let worker = self.worker_mut(no).expect("it was chosen from this list");
        worker.last_given = given;
        worker.permits += 1;
        worker.permit_tokens += prompt_tokens;
        worker.is_asked_again |= asks_alone;
        Assigned {
            worker: no,
            peer: worker.report.description.peer.clone(),
            link: worker.link.clone(),
            gone: worker.gone.clone(),
            prompt_tokens,
            refused: false,
            asks_alone,
        }
    }

    /// Gives a place back. A worker that was lost meanwhile has none to take.
    pub fn release(&mut self, assigned: &mut Assigned<L>) {
        self.answered(assigned);
        if let Some(worker) = self.worker_mut(assigned.worker) {
            worker.permits -= 1;
            worker.permit_tokens -= assigned.prompt_tokens;
            // A request that got nothing leaves nothing behind.
            worker.is_full &= assigned.refused;
        }
    }

    /// The worker said that some tokens of a prompt were cached there.
    pub fn mark_reuses(&mut self, no: WorkerNo) {
        if let Some(worker) = self.worker_mut(no) {
            worker.reuses = true;
        }
    }

    /// The worker refused the request for lack of room.
    pub fn mark_full(&mut self, assigned: &mut Assigned<L>) {
        self.answered(assigned);
        assigned.refused = true;
        if let Some(worker) = self.worker_mut(assigned.worker) {
            worker.is_full = true;
        }
    }

    /// The worker has taken the request in, or will not: others may ask it.
    pub fn answered(&mut self, assigned: &mut Assigned<L>) {
        if std::mem::take(&mut assigned.asks_alone)
            && let Some(worker) = self.worker_mut(assigned.worker)
        {
            worker.is_asked_again = false;
        }
    }

    fn worker_mut(&mut self, no: WorkerNo) -> Option<&mut Worker<L>> {
        self.workers.iter_mut().find(|worker| worker.no == no)
    }

    /// Number of workers of a role in a state.
    #[must_use]
    pub fn count(&self, role: Role, state: WorkerState) -> usize {
        self.workers.iter().filter(|worker| worker.is(role) && worker.report.state == state).count()
    }
}

fn decode_candidate<L>(worker: &Worker<L>) -> DecodeCandidate<'_> {
    let (description, load) = (&worker.report.description, &worker.report.load);
    DecodeCandidate {
        peer: &description.peer,
        sequences: worker.permits.max(load.waiting.saturating_add(load.running)),
        sequences_max: description.max_sequences,
        // The worker's own count may be old, or include what other routers gave it: it has the last word by refusing.
        has_room: !worker.is_full && !worker.is_asked_again && worker.permits < description.max_sequences,
    }
}

#[cfg(test)]
mod tests;
