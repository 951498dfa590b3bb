//! Choosing experts, and sorting tokens by expert.

use std::ops::Range;

use crate::vector::{Precision, Rounding, ToBf16, exp, greater};

/// One expert chosen for one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pick {
    pub(crate) expert: u32,
    /// Its part in the weighted sum.
    pub(crate) weight: f32,
}

/// Chooses the `picks.len()` experts of greatest logit, the lowest index among equals, and weighs them by a softmax over those logits alone.
/// The picks end up in ascending order of experts, which is the order in which experts are added.
/// Source: `MLPBlock.forward` in openai/gpt-oss `gpt_oss/torch/model.py`.
pub(crate) fn choose(logits: &[f32], weights: Precision, picks: &mut [Pick]) {
    let mut chosen = 0;
    for (expert, &logit) in logits.iter().enumerate() {
        // Insertion into a short list, descending; until the end `weight` holds the logit.
        let place = picks[..chosen].iter().position(|pick| logit > pick.weight).unwrap_or(chosen);
        if place == picks.len() {
            continue;
        }
        chosen = (chosen + 1).min(picks.len());
        picks[place..chosen].rotate_right(1);
        picks[place] = Pick { expert: expert as u32, weight: logit };
    }
    let top = picks.iter().map(|pick| pick.weight).fold(f32::NEG_INFINITY, greater);
    let mut total = 0.0;
    for pick in picks.iter_mut() {
        pick.weight = exp(pick.weight - top);
        total += pick.weight;
    }
    for pick in picks.iter_mut() {
        let weight = pick.weight / total;
        pick.weight = match weights {
            Precision::F32 => weight,
            Precision::Bf16 => ToBf16::round(weight),
        };
    }
    picks.sort_unstable_by_key(|pick| pick.expert);
}

/// All (token, pick) pairs of a step, sorted by expert, then token. Each rank knows the whole of it: that is how it knows where another rank
/// put a row.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    /// `[tokens, experts per token]`, ascending experts in each row.
    pub(crate) picks: Vec<Pick>,
    /// `starts[e]..starts[e + 1]`: the places of expert `e` in `tokens`.
    pub(crate) starts: Vec<usize>,
    /// The token of each place.
    pub(crate) tokens: Vec<u32>,
    /// `[tokens, experts per token]`: the place of each pick.
    pub(crate) places: Vec<u32>,
}

impl Routes {
    /// Makes room for a step; the caller fills `picks`, then calls [`Routes::sort`].
    pub(crate) fn reset(&mut self, tokens: usize, per_token: usize) {
        self.picks.clear();
        self.picks.resize(tokens * per_token, Pick { expert: 0, weight: 0.0 });
    }

    /// Sorts the pairs by counting.
    pub(crate) fn sort(&mut self, experts: usize, per_token: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for pick in &self.picks {
            self.starts[pick.expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        let mut next = self.starts.clone();
        self.tokens.clear();
        self.tokens.resize(self.picks.len(), 0);
        self.places.clear();
        for (i, pick) in self.picks.iter().enumerate() {
            let place = next[pick.expert as usize];
            next[pick.expert as usize] += 1;
            self.tokens[place] = (i / per_token) as u32;
            self.places.push(place as u32);
        }
    }

    /// The places of an expert.
    pub(crate) fn of(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(logits: &[f32], weights: Precision) -> Vec<(u32, f32)> {
        let mut picks = vec![Pick { expert: 0, weight: 0.0 }; 4];
        choose(logits, weights, &mut picks);
        picks.iter().map(|pick| (pick.expert, pick.weight)).collect()
    }

    #[test]
    fn the_lowest_index_wins_a_tie_and_picks_ascend() {
        let picks = chosen(&[1.0, 3.0, 1.0, 1.0, 3.0, 1.0], Precision::F32);
        assert_eq!(picks.iter().map(|pick| pick.0).collect::<Vec<_>>(), [0, 1, 2, 4]);
    }

    #[test]
    fn weights_are_a_softmax_over_the_chosen() {
        let logits = [0.0, 2.0f32.ln(), 4.0f32.ln(), -9.0, 8.0f32.ln()];
        for (got, want) in chosen(&logits, Precision::F32).iter().zip([1.0 / 15.0, 2.0 / 15.0, 4.0 / 15.0, 8.0 / 15.0])
        {
            assert!((got.1 - want).abs() < 1e-6, "{} against {want}", got.1);
        }
        for (_, weight) in chosen(&logits, Precision::Bf16) {
            assert_eq!(weight.to_bits() & 0xffff, 0, "{weight} is no bf16");
        }
    }

    #[test]
    fn pairs_are_sorted_by_expert_then_token() {
        let pick = |expert| Pick { expert, weight: 0.5 };
        let mut routes =
            Routes { picks: vec![pick(0), pick(2), pick(1), pick(2), pick(0), pick(1)], ..Routes::default() };
        routes.sort(4, 2);
        assert_eq!(routes.tokens, [0, 2, 1, 2, 0, 1]);
        assert_eq!(routes.places, [0, 4, 2, 5, 1, 3]);
        assert_eq!((routes.of(2), routes.of(3)), (4..6, 6..6));
    }
}
