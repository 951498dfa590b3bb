//! Which kernel computes a matrix product: the one place where that is chosen, by number of columns.
//!
//! Up to 16 columns the weights are streamed once (`SkinnyGemm`), above that the tensor cores are kept busy
//! (`TileGemm`). For experts the number that counts is the mean number of tokens an expert. Borders: measured on an
//! H200, kernels/RESULTS.md.

use device::View;
use half::bf16;
use kernels::{GatherRows, Grouped, Output, PackedWeights, SkinnyGemm, TileGemm};

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

/// The index in [`EXPERT_TILES`] for `pairs` pairs of token and expert, spread over `experts`.
pub(crate) fn expert_tile(pairs: usize, experts: usize) -> usize {
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
    let (kernels, stream, workspace) = (&gpu.kernels, &gpu.stream, &mut gpu.workspace);
    if columns <= SKINNY_COLUMNS {
        SkinnyGemm { weights, x, bias, out, routing: None, workspace }.enqueue(kernels, stream)?;
    } else {
        TileGemm { weights, x, bias, out, routing: None, workspace }.enqueue(kernels, stream)?;
    }
    Ok(())
}

/// The rank's experts on `tokens` tokens of `acts.normed`, dispatched into routing `tile`: fills `acts.expert_out`.
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
    let Activations { normed, routings, gathered, activated, expert_out, .. } = acts;
    let routing = &routings[tile];
    let (hidden, units) = (layer.gate_up.weight.shape()[1], layer.down.weight.shape()[1]);
    let pairs = tokens * routing.top;
    let x = normed.slice(..tokens * hidden);
    let bias = Some(layer.gate_up.bias.view());
    let down_bias = adds_bias.then(|| layer.down.bias.view());
    let (gate_up, down) = (&layer.gate_up.weight, &layer.down.weight);
    if tile < SKINNY_TILES {
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
        let tile = |tokens: usize, experts: usize| EXPERT_TILES[expert_tile(4 * tokens, experts)];
        assert_eq!([1, 32, 64, 128, 512, 8192].map(|tokens| tile(tokens, 32)), [8, 8, 16, 32, 128, 256]);
        assert_eq!([1, 64, 128, 256, 1024, 8192].map(|tokens| tile(tokens, 128)), [8, 8, 8, 16, 64, 256]);
    }
}
