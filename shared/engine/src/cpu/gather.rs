//! Experts under attention data parallelism: each attention group knows the tokens of its own sequences, each rank has some experts, and any
//! token may choose any of them. So what the experts need of a token goes to all ranks first, and each group reads the sums of its own tokens
//! afterwards (`AddExperts`).

use std::ops::Range;

use model::ShardPlan;

use super::routing::Pick;
use crate::EngineError;
use crate::link::Link;

/// What a token brings along.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenSizes {
    /// Width of the residual stream.
    pub(crate) hidden: usize,
    /// Experts that it chooses.
    pub(crate) per_token: usize,
}

/// The tokens of a step, those of all attention groups, groups ascending.
#[derive(Default)]
pub(crate) struct GatheredTokens {
    /// What enters the experts, `[tokens, hidden]`.
    pub(crate) x: Vec<f32>,
    /// Which of the tokens are this rank's group's; maybe none.
    pub(crate) own: Range<usize>,
}

impl GatheredTokens {
    /// Publishes the tokens of this rank's group and takes in everyone's. `normed`: `[own tokens, hidden]`. `picks`: `[own tokens, per
    /// token]`, and afterwards `[tokens, per token]`: they travel as well, so that no rank chooses for tokens that are not its own.
    ///
    /// # Errors
    /// [`EngineError::RankLost`].
    pub(crate) fn gather(
        &mut self,
        link: &mut Link,
        plan: &ShardPlan,
        normed: &[f32],
        picks: &mut Vec<Pick>,
        sizes: TokenSizes,
    ) -> Result<(), EngineError> {
        let TokenSizes { hidden, per_token } = sizes;
        let publish = |out: &mut Vec<f32>| {
            out.clear();
            // The ranks of a group hold the same tokens: one of them speaks.
            if plan.tp_rank == 0 {
                out.extend_from_slice(normed);
                out.extend(picks.iter().flat_map(|pick| [pick.expert as f32, pick.weight]));
            }
        };
        let (tp, dp_rank) = (plan.layout.tp as usize, plan.dp_rank);
        let Self { x, own } = self;
        x.clear();
        let mut all_picks = Vec::new();
        link.exchange(publish, |parts| {
            for (group, part) in parts.iter().step_by(tp).enumerate() {
                let (start, tokens) = (x.len() / hidden, part.len() / (hidden + 2 * per_token));
                let (normed, part) = part.split_at(tokens * hidden);
                x.extend_from_slice(normed);
                let (pairs, _) = part.as_chunks::<2>();
                all_picks.extend(pairs.iter().map(|&[expert, weight]| Pick { expert: expert as u32, weight }));
                if group == dp_rank {
                    *own = start..start + tokens;
                }
            }
        })?;
        *picks = all_picks;
        Ok(())
    }
}
