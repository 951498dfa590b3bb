//! Which kernel computes a matrix product, and in what tiles, by number of columns: the one place where that is chosen.
//!
//! Up to 16 columns, 24 of an MXFP4 expert, the weights are streamed once ([`SkinnyGemm`](crate::SkinnyGemm)), above that the tensor
//! cores are kept busy ([`TileGemm`](crate::TileGemm)); activations are bf16 in both. FP8 weights meet FP8 activations where there are
//! many columns ([`Fp8Gemm`](crate::Fp8Gemm)). For experts, both products of which are one launch for few tokens an expert
//! ([`SkinnyExperts`](crate::SkinnyExperts)), the number that counts is the mean number of tokens an expert. Borders: measured on an H200,
//! RESULTS.md.

use crate::Format;

/// Columns up to which a dense product is [`SkinnyGemm`](crate::SkinnyGemm)'s.
pub const SKINNY_COLUMNS: usize = 16;
/// Columns from which a dense product with FP8 weights takes FP8 activations.
pub const FP8_COLUMNS: usize = 256;
/// Slots of a tile that grouped products are built for; the first [`SKINNY_TILES`] of them by [`SkinnyGemm`](crate::SkinnyGemm)
/// and [`SkinnyExperts`](crate::SkinnyExperts).
pub const EXPERT_TILES: [usize; 6] = [8, 16, 24, 64, 128, 256];
/// How many of [`EXPERT_TILES`] are those two's; the last of them for MXFP4 only.
pub const SKINNY_TILES: usize = 3;
/// Tokens an MXFP4 expert, on average, up to which each of [`EXPERT_TILES`] but the last is the fastest.
const MXFP4_BORDERS: [usize; 5] = [4, 10, 21, 56, 90];
/// The same of bf16 experts, which have no tiles of 24.
const BF16_BORDERS: [usize; 5] = [6, 11, 11, 48, 90];
/// The same of FP8 experts: up to 12 tokens each, weights are streamed for bf16 activations; above, both are FP8.
const FP8_BORDERS: [usize; 2] = [5, 12];
/// The one width of [`EXPERT_TILES`] that [`Fp8Gemm`](crate::Fp8Gemm) takes.
const FP8_TILE: usize = 4;

/// The index in [`EXPERT_TILES`] for `pairs` pairs of token and expert, spread over `experts`.
#[must_use]
pub fn expert_tile(format: Format, pairs: usize, experts: usize) -> usize {
    let (borders, widest): (&[usize], usize) = match format {
        Format::Fp8 => (&FP8_BORDERS, FP8_TILE),
        Format::Mxfp4 => (&MXFP4_BORDERS, MXFP4_BORDERS.len()),
        Format::Bf16 => (&BF16_BORDERS, BF16_BORDERS.len()),
    };
    borders.iter().position(|border| pairs <= border * experts).unwrap_or(widest)
}

/// Pairs of token and expert up to which both products are one launch. With more the second one's first weights count for less, and
/// blocks that wait for all others for more: steps of 120b took 3.8 % less than before at one token, as long at 8 and 2.7 % longer at 16.
const ONE_LAUNCH_PAIRS: usize = 32;

/// Whether both products of experts, for `pairs` in tiles of [`EXPERT_TILES`]`[tile]`, are one launch of
/// [`SkinnyExperts`](crate::SkinnyExperts). All its blocks must be on the GPU at once, so not where that `shares_gpu` with kernels that wait.
#[must_use]
pub const fn is_one_launch(tile: usize, pairs: usize, shares_gpu: bool) -> bool {
    tile == 0 && pairs <= ONE_LAUNCH_PAIRS && !shares_gpu
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
        assert_eq!([1, 32, 64, 128, 512, 8192].map(|tokens| tile(tokens, 32)), [8, 8, 16, 24, 128, 256]);
        assert_eq!([1, 64, 128, 256, 1024, 8192].map(|tokens| tile(tokens, 128)), [8, 8, 8, 16, 64, 256]);
    }

    #[test]
    fn every_border_parts_two_neighbours() {
        for (idx, border) in MXFP4_BORDERS.into_iter().enumerate() {
            assert_eq!([0, 1].map(|more| expert_tile(Format::Mxfp4, 32 * border + more, 32)), [idx, idx + 1]);
        }
    }

    #[test]
    fn only_mxfp4_has_tiles_of_24() {
        let skinny = |format, pairs| {
            (expert_tile(format, pairs, 1) < SKINNY_TILES).then(|| EXPERT_TILES[expert_tile(format, pairs, 1)])
        };
        for format in [Format::Bf16, Format::Fp8] {
            assert!((1..=1024).filter_map(|pairs| skinny(format, pairs)).all(|slots| slots <= 16), "{format:?}");
        }
    }
}
