//! Which kernel computes a matrix product: the one place where that is chosen, by number of columns.
//!
//! Up to 16 columns the weights are streamed once (`SkinnyGemm`), above that the tensor cores are kept busy
//! (`TileGemm`); activations are bf16 in both. FP8 weights meet FP8 activations where there are many columns (`Fp8Gemm`).
//! For experts the number that counts is the mean number of tokens an expert. Borders: measured on an H200,
//! kernels/RESULTS.md.

use device::{Stream, View};
use half::bf16;
use kernels::{
    Format, Fp8Gemm, Fp8Output, Fp8Rows, GatherRows, Grouped, Output, PackedWeights, QuantizeRows, SkinnyGemm, TileGemm,
};
use model::{DenseFormat, ExpertFormat, ModelConfig, ShardPlan, WeightScheme};

use super::activations::Activations;
use super::rank::Gpu;
use super::weights::Layer;
use crate::EngineError;

/// Columns up to which a dense product is [`SkinnyGemm`]'s.
const SKINNY_COLUMNS: usize = 16;
/// Slots of a tile that grouped products are built for; the first [`SKINNY_TILES`] of them by [`SkinnyGemm`].
pub(crate) const EXPERT_TILES: [usize; 6] = [8, 16, 32, 64, 128, 256];
const SKINNY_TILES: usize = 2;
/// Tokens an expert, on average, up to which each of [`EXPERT_TILES`] but the last is the fastest.
const TILE_BORDERS: [usize; 5] = [6, 11, 16, 48, 90];

/// The same of FP8 experts: up to 12 tokens each, weights are streamed for bf16 activations; above, both are FP8.
const FP8_BORDERS: [usize; 2] = [5, 12];
/// The one width of [`EXPERT_TILES`] that [`Fp8Gemm`] takes.
const FP8_TILE: usize = 4;
/// Columns from which a dense product with FP8 weights takes FP8 activations.
const FP8_COLUMNS: usize = 256;

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

/// The index in [`EXPERT_TILES`] for `pairs` pairs of token and expert, spread over `experts`.
pub(crate) fn expert_tile(format: Format, pairs: usize, experts: usize) -> usize {
    if format == Format::Fp8 {
        return FP8_BORDERS.iter().position(|border| pairs <= border * experts).unwrap_or(FP8_TILE);
    }
    TILE_BORDERS.iter().position(|border| pairs <= border * experts).unwrap_or(TILE_BORDERS.len())
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
    } else if tile < SKINNY_TILES {
        let out = Output::SwiGlu(activated.slice_mut(..pairs * units));
        let grouped = Some(Grouped { routing, gather: true, settled: false });
        SkinnyGemm { weights: gate_up, x, bias, out, routing: grouped, workspace }.enqueue(kernels, stream)?;
        let (x, out) = (activated.slice(..pairs * units), Output::Bf16(expert_out.slice_mut(..pairs * hidden)));
        let grouped = Some(Grouped { routing, gather: false, settled: true });
        SkinnyGemm { weights: down, x, bias: down_bias, out, routing: grouped, workspace }.enqueue(kernels, stream)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_grow_with_the_tokens_of_an_expert() {
        let width = |format, tokens: usize, experts: usize| EXPERT_TILES[expert_tile(format, 4 * tokens, experts)];
        let tile = |tokens: usize, experts: usize| width(Format::Mxfp4, tokens, experts);
        let fp8 = |tokens: usize| width(Format::Fp8, tokens, 32);
        assert_eq!([1, 32, 64, 128, 8192].map(fp8), [8, 8, 16, 128, 128]);
        assert_eq!([1, 32, 64, 128, 512, 8192].map(|tokens| tile(tokens, 32)), [8, 8, 16, 32, 128, 256]);
        assert_eq!([1, 64, 128, 256, 1024, 8192].map(|tokens| tile(tokens, 128)), [8, 8, 8, 16, 64, 256]);
    }
}
