//! Matrix products, each by the kernel that `kernels::choice` says.

use device::{Stream, View};
use half::bf16;
use kernels::choice::{FP8_COLUMNS, SKINNY_COLUMNS, SKINNY_TILES, is_one_launch};
use kernels::{
    Format, Fp8Gemm, Fp8Output, Fp8Rows, GatherRows, Grouped, Output, PackedWeights, QuantizeRows, SkinnyExperts,
    SkinnyGemm, TileGemm,
};
use model::{DenseFormat, ExpertFormat, ModelConfig, ShardPlan, WeightScheme};

use super::activations::Activations;
use super::rank::Gpu;
use super::weights::Layer;
use crate::EngineError;

/// Activations in FP8, made once for the largest step; `None` or absent where the weights are not FP8.
#[derive(Default)]
pub(crate) struct Fp8Activations {
    /// Inputs of products, by their k.
    inputs: Vec<Fp8Rows>,
    /// Between the two products of experts.
    activated: Option<Fp8Rows>,
}

impl Fp8Activations {
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn new(
        stream: &Stream,
        config: &ModelConfig,
        plan: &ShardPlan,
        scheme: WeightScheme,
        max_tokens: usize,
    ) -> Result<Self, EngineError> {
        let mut fp8 = Self::default();
        let pairs = max_tokens * config.experts_per_token;
        if scheme.experts == ExpertFormat::Fp8 {
            fp8.inputs.push(Fp8Rows::new(stream, pairs, config.hidden_size)?);
            fp8.activated = Some(Fp8Rows::new(stream, pairs, plan.units.len())?);
        }
        if scheme.dense == DenseFormat::Fp8 {
            for k in [config.hidden_size, plan.heads.len() * config.head_dim] {
                if fp8.input(k).is_none() {
                    fp8.inputs.push(Fp8Rows::new(stream, max_tokens, k)?);
                }
            }
        }
        Ok(fp8)
    }

    fn input(&mut self, k: usize) -> Option<&mut Fp8Rows> {
        self.inputs.iter_mut().find(|rows| rows.k() == k)
    }
}

/// `out = x weights^T + bias`, for one matrix.
///
/// # Errors
/// [`EngineError::Gpu`].
pub(crate) fn dense(
    gpu: &mut Gpu,
    weights: &PackedWeights,
    bias: Option<View<'_, bf16>>,
    x: View<'_, bf16>,
    out: Output<'_>,
) -> Result<(), EngineError> {
    let columns = x.len() / weights.shape()[1];
    if columns == 0 {
        return Ok(()); // an attention group without a row in this step
    }
    let (kernels, stream, workspace) = (&gpu.kernels, &gpu.stream, &mut gpu.workspace);
    if weights.format() == Format::Fp8 && columns >= FP8_COLUMNS {
        let quantized = gpu.fp8.input(weights.shape()[1]).expect("made for every k of FP8 weights");
        QuantizeRows { x, routing: None, out: quantized }.enqueue(kernels, stream)?;
        let out = match out {
            Output::Bf16(out) => Fp8Output::Bf16(out),
            Output::F32(out) => Fp8Output::F32(out),
            Output::SwiGlu(_) => unreachable!("only experts are activated"),
        };
        Fp8Gemm { weights, x: quantized, slots: columns, bias, out, routing: None }.enqueue(kernels, stream)?;
    } else if columns <= SKINNY_COLUMNS {
        SkinnyGemm { weights, x, bias, out, routing: None, workspace }.enqueue(kernels, stream)?;
    } else {
        TileGemm { weights, x, bias, out, routing: None, workspace }.enqueue(kernels, stream)?;
    }
    Ok(())
}

/// The rank's experts on `tokens` tokens, those of all attention groups, dispatched into routing `tile`: fills `acts.expert_out`.
/// `adds_bias`: whether the bias of the second product is this rank's to add.
///
/// # Errors
/// [`EngineError::Gpu`].
pub(crate) fn experts(
    gpu: &mut Gpu,
    layer: &Layer,
    acts: &mut Activations,
    tile: usize,
    tokens: usize,
    adds_bias: bool,
) -> Result<(), EngineError> {
    let (kernels, stream, workspace) = (&gpu.kernels, &gpu.stream, &mut gpu.workspace);
    let Activations { normed, normed_of_all, routings, gathered, activated, expert_out, .. } = acts;
    let routing = &routings[tile];
    let (hidden, units) = (layer.gate_up.weight.shape()[1], layer.down.weight.shape()[1]);
    let pairs = tokens * routing.top;
    let x = normed_of_all.as_ref().unwrap_or(normed).slice(..tokens * hidden);
    let bias = Some(layer.gate_up.bias.view());
    let down_bias = adds_bias.then(|| layer.down.bias.view());
    let (gate_up, down) = (&layer.gate_up.weight, &layer.down.weight);
    if gate_up.format() == Format::Fp8 && tile >= SKINNY_TILES {
        let Fp8Activations { inputs, activated } = &mut gpu.fp8;
        let gathered = inputs.iter_mut().find(|rows| rows.k() == hidden).expect("made for FP8 experts");
        let activated = activated.as_mut().expect("made for FP8 experts");
        QuantizeRows { x, routing: Some(routing), out: gathered }.enqueue(kernels, stream)?;
        let (slots, routing, out) = (pairs, Some(routing), Fp8Output::SwiGlu(activated));
        Fp8Gemm { weights: gate_up, x: gathered, slots, bias, out, routing }.enqueue(kernels, stream)?;
        let out = Fp8Output::Bf16(expert_out.slice_mut(..pairs * hidden));
        Fp8Gemm { weights: down, x: activated, slots, bias: down_bias, out, routing }.enqueue(kernels, stream)?;
    } else if is_one_launch(tile, pairs, gpu.is_shared) {
        SkinnyExperts {
            gate_up,
            down,
            x,
            gate_up_bias: bias,
            down_bias,
            activated: activated.slice_mut(..pairs * units),
            out: expert_out.slice_mut(..pairs * hidden),
            routing,
            workspace,
        }
        .enqueue(kernels, stream)?;
    } else if tile < SKINNY_TILES {
        let out = Output::SwiGlu(activated.slice_mut(..pairs * units));
        let by_token = Some(Grouped { routing, gather: true, settled: false });
        SkinnyGemm { weights: gate_up, x, bias, out, routing: by_token, workspace }.enqueue(kernels, stream)?;
        let (x, out) = (activated.slice(..pairs * units), Output::Bf16(expert_out.slice_mut(..pairs * hidden)));
        let by_slot = Some(Grouped { routing, gather: false, settled: true });
        SkinnyGemm { weights: down, x, bias: down_bias, out, routing: by_slot, workspace }.enqueue(kernels, stream)?;
    } else {
        let rows = gathered.slice_mut(..pairs * hidden);
        GatherRows { x, routing, out: rows, hidden }.enqueue(kernels, stream)?;
        let (x, out) = (gathered.slice(..pairs * hidden), Output::SwiGlu(activated.slice_mut(..pairs * units)));
        let routing = Some(routing);
        TileGemm { weights: gate_up, x, bias, out, routing, workspace }.enqueue(kernels, stream)?;
        let (x, out) = (activated.slice(..pairs * units), Output::Bf16(expert_out.slice_mut(..pairs * hidden)));
        TileGemm { weights: down, x, bias: down_bias, out, routing, workspace }.enqueue(kernels, stream)?;
    }
    Ok(())
}
