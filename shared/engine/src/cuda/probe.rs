//! Looking into the layers of a step, and overruling them: how numeric tests tell rounding from flipped experts.

use half::bf16;
use kernels::{ExpertWeights, RmsNorm};

use super::forward::Forward;
use super::weights::Layer;
use crate::EngineError;

/// Where a token of a step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Its slot.
    pub slot: u32,
    /// Its position in the slot's sequence.
    pub position: u32,
}

/// Sees and may replace what layers compute, on the rank's own thread. For numeric tests and benches: an engine with a
/// probe runs every step kernel by kernel and waits for each layer. No service can set one.
pub trait Probe: std::fmt::Debug + Send + Sync {
    /// The residual stream in front of `layer`, `[tokens, hidden]`. What is returned, in the same shape, takes its place.
    fn layer_input(&self, layer: usize, tokens: &[Place], hidden: &[bf16]) -> Option<Vec<bf16>>;

    /// The router's unrounded logits in `layer`, `[tokens, experts]`, and the experts picked for each token,
    /// `[tokens, top]`. What is returned, in the shape of `picks`, takes their place, with weights that follow from the
    /// logits as they would have.
    fn routed(&self, layer: usize, tokens: &[Place], logits: &[f32], picks: &[i32]) -> Option<Vec<i32>>;
}

impl Forward<'_> {
    /// Shows the probe, if there is one, the input of layer `idx`.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(super) fn probe_input(&mut self, idx: usize, layer: &Layer) -> Result<(), EngineError> {
        let Some(probe) = &self.model.probe else { return Ok(()) };
        let places = self.places();
        let len = self.batch.tokens.len() * self.model.config.hidden_size;
        let (residual, normed, stream) = (&mut self.acts.residual, &mut self.acts.normed, &self.gpu.stream);
        let hidden = stream.download(residual.slice(..len))?;
        let Some(forced) = probe.layer_input(idx, &places, &hidden) else { return Ok(()) };
        stream.copy_from_host(residual.slice_mut(..len), &forced)?;
        RmsNorm {
            residual: residual.slice_mut(..len),
            delta: None,
            weight: layer.attn_norm.view(),
            out: normed.slice_mut(..len),
            eps: self.model.config.rms_norm_eps,
        }
        .enqueue(&self.gpu.kernels, stream)?;
        Ok(())
    }

    /// Shows the probe, if there is one, what layer `idx` routed.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(super) fn probe_picks(&mut self, idx: usize) -> Result<(), EngineError> {
        let Some(probe) = &self.model.probe else { return Ok(()) };
        let (tokens, config) = (self.batch.tokens.len(), &self.model.config);
        let (pairs, stream) = (tokens * config.experts_per_token, &self.gpu.stream);
        let logits = stream.download(self.acts.router_logits.slice(..tokens * config.num_experts))?;
        let picks = stream.download(self.acts.experts.slice(..pairs))?;
        let Some(forced) = probe.routed(idx, &self.places(), &logits, &picks) else { return Ok(()) };
        let weights: Vec<f32> = logits
            .chunks(config.num_experts)
            .zip(forced.chunks(config.experts_per_token))
            .flat_map(|(logits, picks)| weights(logits, picks, self.model.routing))
            .collect();
        stream.copy_from_host(self.acts.experts.slice_mut(..pairs), &forced)?;
        stream.copy_from_host(self.acts.expert_weights.slice_mut(..pairs), &weights)?;
        Ok(())
    }

    fn places(&self) -> Vec<Place> {
        let place = |(slot, position): (&i32, &i32)| Place { slot: *slot as u32, position: *position as u32 };
        self.batch.slots.iter().zip(&self.batch.positions).map(place).collect()
    }
}

/// Softmax over the logits of the picked experts, rounded as the router's kernel does.
fn weights(logits: &[f32], picks: &[i32], mode: ExpertWeights) -> Vec<f32> {
    let round = |x: f32| if mode == ExpertWeights::Bf16 { bf16::from_f32(x).to_f32() } else { x };
    let picked: Vec<f32> = picks.iter().map(|expert| round(logits[*expert as usize])).collect();
    let top = picked.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shares: Vec<f32> = picked.iter().map(|logit| (logit - top).exp()).collect();
    let sum: f32 = shares.iter().sum();
    shares.into_iter().map(|share| round(share / sum)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_a_softmax_over_the_picks_alone() {
        let logits = [5.0, 1.0, 1.0 + 2.0_f32.ln(), 1.0];
        let close = |got: Vec<f32>, want: [f32; 3]| {
            assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 2e-3), "{got:?}");
        };
        close(weights(&logits, &[2, 1, 3], ExpertWeights::F32), [0.5, 0.25, 0.25]);
        close(weights(&logits, &[2, 1, 3], ExpertWeights::Bf16), [0.5, 0.25, 0.25]);
        let third = weights(&[0.0; 3], &[0, 1, 2], ExpertWeights::Bf16)[0];
        assert_eq!(third, bf16::from_f32(third).to_f32());
    }
}
