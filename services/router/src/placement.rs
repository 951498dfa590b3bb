//! Which pair takes the next request, among pairs whose KV caches fit each other: least loaded, and at prefill with as much of the prompt computed
//! before as that is worth.

use types::PeerId;

/// A prefill worker that could take the request.
#[derive(Debug, Clone)]
pub struct PrefillCandidate<'a> {
    /// Who.
    pub peer: &'a PeerId,
    /// Prompt tokens that would be computed before this request's.
    pub pending_prompt_tokens: u64,
    /// Tokens of this request's prompt that it would compute: those that it has not computed before.
    pub own_prompt_tokens: u64,
    /// When it was given a request last, as a count.
    pub last_given: u64,
    /// Whether it may be given one more.
    pub has_room: bool,
}

/// A decode worker that could take the request.
#[derive(Debug, Clone)]
pub struct DecodeCandidate<'a> {
    /// Who.
    pub peer: &'a PeerId,
    /// Sequences that it has.
    pub sequences: u32,
    /// Sequences that it can have.
    pub sequences_max: u32,
    /// Whether it may be given one more.
    pub has_room: bool,
}

/// Why no pair was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPlace {
    /// No two of the candidates fit each other.
    NoPair,
    /// Pairs there are, but none has room now.
    NoRoom,
}

/// Chooses a pair, as indices into the two lists. A worker in `avoid` is taken only if there is no other; then prefill's tokens to compute until the
/// first of this request, those that wait and its own, are to be few, so a busy worker is not chosen for what it has computed before; then decode's
/// share of its sequences in use. Among equals it is the prefill worker that was given nothing for longest, so that the memory of all of them is used
/// for what prompts have in common, and then the earlier candidate.
///
/// # Errors
/// When there is no pair, or none with room.
pub fn choose(
    prefills: &[PrefillCandidate<'_>],
    decodes: &[DecodeCandidate<'_>],
    fit: impl Fn(usize, usize) -> bool,
    avoid: &[PeerId],
) -> Result<(usize, usize), NoPlace> {
    let mut has_pair = false;
    let mut best = None;
    for (p, prefill) in prefills.iter().enumerate() {
        for (d, decode) in decodes.iter().enumerate() {
            if !fit(p, d) {
                continue;
            }
            has_pair = true;
            if !prefill.has_room || !decode.has_room {
                continue;
            }
            let num_avoided = [prefill.peer, decode.peer].iter().filter(|peer| avoid.contains(peer)).count();
            let share = u64::from(decode.sequences) * 1_000 / u64::from(decode.sequences_max.max(1));
            let tokens_to_compute = prefill.pending_prompt_tokens + prefill.own_prompt_tokens;
            let cost = (num_avoided, tokens_to_compute, share, prefill.last_given);
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, (p, d)));
            }
        }
    }
    match best {
        Some((_, pair)) => Ok(pair),
        None if has_pair => Err(NoPlace::NoRoom),
        None => Err(NoPlace::NoPair),
    }
}

#[cfg(test)]
mod tests {
    use types::{Incarnation, WorkerId};

    use super::*;

    struct Case {
        name: &'static str,
        /// Pending tokens, own tokens, room.
        prefills: &'static [(u64, u64, bool)],
        /// Sequences of 8, room.
        decodes: &'static [(u32, bool)],
        /// Pairs that do not fit.
        unfit: &'static [(usize, usize)],
        avoid: &'static [&'static str],
        want: Result<(usize, usize), NoPlace>,
    }

    const CASES: &[Case] = &[
        Case {
            name: "no workers",
            prefills: &[],
            decodes: &[(0, true)],
            unfit: &[],
            avoid: &[],
            want: Err(NoPlace::NoPair),
        },
        Case {
            name: "least loaded of each side",
            prefills: &[(900, 0, true), (100, 0, true)],
            decodes: &[(3, true), (1, true), (2, true)],
            unfit: &[],
            avoid: &[],
            want: Ok((1, 1)),
        },
        Case {
            name: "who has computed most of the prompt before",
            prefills: &[(0, 3_000, true), (0, 200, true), (0, 1_000, true)],
            decodes: &[(0, true)],
            unfit: &[],
            avoid: &[],
            want: Ok((1, 0)),
        },
        Case {
            name: "not the one that has, if others would be done before it",
            prefills: &[(4_000, 200, true), (1_000, 3_000, true)],
            decodes: &[(0, true)],
            unfit: &[],
            avoid: &[],
            want: Ok((1, 0)),
        },
        Case {
            name: "the one that has, although it is busier",
            prefills: &[(1_000, 3_000, true), (3_700, 200, true)],
            decodes: &[(0, true)],
            unfit: &[],
            avoid: &[],
            want: Ok((1, 0)),
        },
        Case {
            name: "equal loads go to the earlier one",
            prefills: &[(0, 0, true), (0, 0, true)],
            decodes: &[(1, true), (1, true)],
            unfit: &[],
            avoid: &[],
            want: Ok((0, 0)),
        },
        Case {
            name: "a full worker is passed over, whatever its load",
            prefills: &[(0, 0, false), (900, 0, true)],
            decodes: &[(0, false), (7, true)],
            unfit: &[],
            avoid: &[],
            want: Ok((1, 1)),
        },
        Case {
            name: "full on one side only",
            prefills: &[(0, 0, true)],
            decodes: &[(8, false)],
            unfit: &[],
            avoid: &[],
            want: Err(NoPlace::NoRoom),
        },
        Case {
            name: "the least loaded ones do not fit each other",
            prefills: &[(0, 0, true), (10, 0, true)],
            decodes: &[(0, true), (1, true)],
            unfit: &[(0, 0), (0, 1)],
            avoid: &[],
            want: Ok((1, 0)),
        },
        Case {
            name: "nothing fits",
            prefills: &[(0, 0, true)],
            decodes: &[(0, true)],
            unfit: &[(0, 0)],
            avoid: &[],
            want: Err(NoPlace::NoPair),
        },
        Case {
            name: "a worker that failed is avoided",
            prefills: &[(0, 0, true)],
            decodes: &[(0, true), (7, true)],
            unfit: &[],
            avoid: &["d0"],
            want: Ok((0, 1)),
        },
        Case {
            name: "a worker that failed is better than none",
            prefills: &[(0, 0, true)],
            decodes: &[(0, true), (8, false)],
            unfit: &[],
            avoid: &["d0", "p0"],
            want: Ok((0, 0)),
        },
    ];

    fn peers(prefix: &str, num: usize) -> Vec<PeerId> {
        let peer = |i| PeerId { worker: WorkerId(format!("{prefix}{i}").into()), incarnation: Incarnation(1) };
        (0..num).map(peer).collect()
    }

    #[test]
    fn the_right_pair_is_chosen() {
        for case in CASES {
            let (p, d) = (peers("p", case.prefills.len()), peers("d", case.decodes.len()));
            let prefills: Vec<_> = std::iter::zip(&p, case.prefills)
                .map(|(peer, (pending, own, room))| PrefillCandidate {
                    peer,
                    pending_prompt_tokens: *pending,
                    own_prompt_tokens: *own,
                    last_given: 0,
                    has_room: *room,
                })
                .collect();
            let decodes: Vec<_> = std::iter::zip(&d, case.decodes)
                .map(|(peer, (sequences, room))| DecodeCandidate {
                    peer,
                    sequences: *sequences,
                    sequences_max: 8,
                    has_room: *room,
                })
                .collect();
            let avoid: Vec<_> =
                p.iter().chain(&d).filter(|peer| case.avoid.contains(&&*peer.worker.0)).cloned().collect();
            let fit = |p, d| !case.unfit.contains(&(p, d));
            assert_eq!(choose(&prefills, &decodes, fit, &avoid), case.want, "{}", case.name);
        }
    }
}
