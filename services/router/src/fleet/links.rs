//! Which workers are pairs: that fit each other, and between which the way of KV is open.

use tokio_util::sync::CancellationToken;
use types::{KvEndpoint, PeerId, Role};

use super::{Fleet, PairNo, Worker, WorkerNo};

/// Two workers that fit each other and are both ready: the way of KV between them is to be opened.
#[derive(Debug)]
pub struct LinkOrder<L> {
    /// Whose answer it is, for [`Fleet::on_linked`].
    pub pair: PairNo,
    /// The prefill worker, which opens it.
    pub prefill: PeerId,
    /// How to reach the prefill worker.
    pub link: L,
    /// The decode worker.
    pub decode: PeerId,
    /// Where the decode worker takes KV.
    pub kv_endpoint: KvEndpoint,
    /// Cancelled when the one or the other is given up.
    pub gone: [CancellationToken; 2],
}

/// How far two workers that fit each other are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    /// They have not been ready together, or the way of KV has failed.
    Unlinked,
    /// The way of KV is being opened, and tried again until it is. `trouble`: what the last attempt met.
    Ordered { trouble: Option<String> },
    /// Requests may use it.
    Open,
}

impl<L: Clone> Fleet<L> {
    /// Pairs whose way of KV is to be opened now; each is named once.
    pub fn to_link(&mut self) -> Vec<LinkOrder<L>> {
        let Self { workers, links, .. } = self;
        let ready = |no: WorkerNo| workers.iter().find(|worker| worker.no == no && worker.is_ready());
        let mut orders = Vec::new();
        for (pair, link) in links.iter_mut().filter(|(_, link)| **link == Link::Unlinked) {
            let (Some(prefill), Some(decode)) = (ready(pair.prefill), ready(pair.decode)) else { continue };
            let Some(kv_endpoint) = decode.report.description.kv_endpoint.clone() else { continue };
            *link = Link::Ordered { trouble: None };
            orders.push(LinkOrder {
                pair: *pair,
                prefill: prefill.report.description.peer.clone(),
                link: prefill.link.clone(),
                decode: decode.report.description.peer.clone(),
                kv_endpoint,
                gone: [prefill.gone.clone(), decode.gone.clone()],
            });
        }
        orders
    }

    /// The way of KV of a pair is open. A worker that was lost meanwhile has none.
    pub fn on_linked(&mut self, pair: PairNo) {
        if let Some(link) = self.links.get_mut(&pair) {
            *link = Link::Open;
        }
    }

    /// An attempt to open the way of KV of a pair has failed; there will be others. Whether the last one failed otherwise, or there was none.
    pub fn on_link_failed(&mut self, pair: PairNo, reason: &str) -> bool {
        let Some(Link::Ordered { trouble }) = self.links.get_mut(&pair) else { return false };
        let is_new = trouble.as_deref() != Some(reason);
        *trouble = Some(reason.to_owned());
        is_new
    }

    /// The way of KV of two workers has failed: they are no pair until it was opened anew.
    pub fn on_unlinked(&mut self, prefill: WorkerNo, decode: WorkerNo) {
        if let Some(link @ Link::Open) = self.links.get_mut(&PairNo { prefill, decode }) {
            *link = Link::Unlinked;
        }
    }

    pub(super) fn are_linked(&self, prefill: &Worker<L>, decode: &Worker<L>) -> bool {
        self.links.get(&PairNo { prefill: prefill.no, decode: decode.no }) == Some(&Link::Open)
    }

    /// Why no pair serves, in words for whoever waits for one: what is missing, or what is wrong with each two workers.
    #[must_use]
    pub fn why_no_pair(&self) -> String {
        let missing: Vec<String> =
            [Role::Prefill, Role::Decode].into_iter().filter_map(|role| self.missing(role)).collect();
        if !missing.is_empty() {
            return missing.join("; ");
        }
        let pairs =
            self.ready(Role::Prefill).flat_map(|prefill| self.ready(Role::Decode).map(move |decode| (prefill, decode)));
        let reasons = pairs.filter_map(|(prefill, decode)| {
            let names = format!("{} and {}", prefill.report.description.peer, decode.report.description.peer);
            match self.links.get(&PairNo { prefill: prefill.no, decode: decode.no }) {
                Some(Link::Open) => None,
                Some(Link::Ordered { trouble: Some(trouble) }) => {
                    Some(format!("no way for kv between {names}: {trouble}"))
                }
                Some(Link::Ordered { trouble: None } | Link::Unlinked) => {
                    Some(format!("the way for kv between {names} is being opened"))
                }
                None => mismatch(prefill, decode).map(|field| format!("{names} do not fit each other: {field}")),
            }
        });
        reasons.collect::<Vec<_>>().join("; ")
    }

    /// Why no worker of a role is ready; `None` if one is.
    fn missing(&self, role: Role) -> Option<String> {
        if self.ready(role).next().is_some() {
            return None;
        }
        let states: Vec<String> = self
            .workers
            .iter()
            .filter(|worker| worker.is(role))
            .map(|worker| format!("{} is {}", worker.report.description.peer, worker.report.state.name()))
            .collect();
        Some(if states.is_empty() {
            format!("no {role} worker answers")
        } else {
            format!("no {role} worker is ready: {}", states.join(", "))
        })
    }
}

/// The first field by which two workers cannot serve one request, with both values.
pub(super) fn mismatch<L>(prefill: &Worker<L>, decode: &Worker<L>) -> Option<String> {
    let (p, d) = (&prefill.report.description, &decode.report.description);
    if p.fingerprint != d.fingerprint {
        return Some(format!("fingerprint: {} and {}", p.fingerprint, d.fingerprint));
    }
    if p.weights_fingerprint != d.weights_fingerprint {
        return Some(format!("weights_fingerprint: {} and {}", p.weights_fingerprint, d.weights_fingerprint));
    }
    if p.numerics != d.numerics {
        return Some(format!("numerics: {} and {}", p.numerics, d.numerics));
    }
    let layouts = p.kv_layout.check_peer(&d.kv_layout).err()?;
    Some(format!("kv_layout.{}: {} and {}", layouts.field, layouts.ours, layouts.theirs))
}
