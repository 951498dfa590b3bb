//! What choosing a kernel and a tile for each shape gains over one choice for all.
//!
//! *Chosen* is what `kernels::choice` says: `SkinnyGemm` up to 16 columns, then `TileGemm` with a width and a split of k for
//! the shape; for experts, a tile by the mean number of tokens an expert. *Generic* is one kernel with one tile for everything:
//! `TileGemm`, 128 rows by 128 columns, k whole.

use half::bf16;
use kernels::choice::{EXPERT_TILES, SKINNY_COLUMNS, SKINNY_TILES, expert_tile};
use kernels::{GatherRows, Grouped, Output, PackedWeights, SkinnyGemm, TileGemm, Workspace};

use crate::experts::{HIDDEN, TOP, pack, pack_experts, routed, routed_to};
use crate::harness::Bench;

const GENERIC_TILE: usize = 128;
/// Copies of a matrix that launches rotate through, so that weights come from memory.
const COPIES: usize = 8;

pub(crate) fn run(bench: &mut Bench) {
    println!("## Chosen kernels and tiles beside one generic choice\n");
    println!("| product, outputs x inputs | tokens | chosen | us | generic, us | gain |");
    println!("|---|---|---|---|---|---|");
    for (name, rows, k) in [("qkv", 5120, 2880), ("attention output", 2880, 4096)] {
        let weights: Vec<PackedWeights> = (0..COPIES).map(|_| pack(bench, rows, k)).collect();
        for columns in [1, 8, 16, 32, 128, 1024, 8192] {
            dense(bench, name, &weights, columns);
        }
    }
    let head = [pack(bench, 201_088, HIDDEN)];
    for columns in [1, 8, 32, 128] {
        dense(bench, "head", &head, columns);
    }
    drop(head);
    for (model, num_experts) in [("20b", 32), ("120b", 128)] {
        let gate_up = pack_experts(bench, num_experts, 2 * HIDDEN, true);
        for tokens in [1, 8, 32, 128, 1024, 8192] {
            experts(bench, &format!("gate and up of {model}"), &gate_up, num_experts, tokens);
        }
        drop(gate_up);
        let down = pack_experts(bench, num_experts, HIDDEN, false);
        for tokens in [1, 8, 32, 128, 1024, 8192] {
            experts(bench, &format!("down of {model}"), &down, num_experts, tokens);
        }
    }
    println!();
}

fn row(name: &str, weights: &PackedWeights, tokens: usize, chosen: &str, us: [f64; 2]) {
    let [rows, k] = weights.shape();
    let [chosen_us, generic_us] = us;
    let gain = generic_us / chosen_us;
    println!("| {name}, {rows} x {k} | {tokens} | {chosen} | {chosen_us:.2} | {generic_us:.2} | {gain:.2} |");
}

fn dense(bench: &Bench, name: &str, weights: &[PackedWeights], columns: usize) {
    let [rows, k] = weights[0].shape();
    let (x, bias) = (bench.values(columns * k), bench.values(rows));
    let mut out = bench.zeros::<bf16>(columns * rows);
    let mut workspace = Workspace::new(&bench.stream).unwrap();
    let is_skinny = columns <= SKINNY_COLUMNS;
    let launches = if weights.len() == 1 { 2 } else { 2 * weights.len() };
    let chosen = bench.time(launches, |i| {
        let (weights, x, out) = (&weights[i % weights.len()], x.view(), Output::Bf16(out.view_mut()));
        let (bias, workspace) = (Some(bias.view()), &mut workspace);
        if is_skinny {
            SkinnyGemm { weights, x, bias, out, routing: None, workspace }.enqueue(&bench.kernels, &bench.stream)
        } else {
            TileGemm { weights, x, bias, out, routing: None, workspace }.enqueue(&bench.kernels, &bench.stream)
        }
    });
    // One expert that every token visits: the grouped kernel takes its tile from the routing and never splits k.
    let routing = routed_to(bench, &bench.zeros(columns), 1, 1, GENERIC_TILE).routing;
    let generic = bench.time(launches, |i| {
        TileGemm {
            weights: &weights[i % weights.len()],
            x: x.view(),
            bias: Some(bias.view()),
            out: Output::Bf16(out.view_mut()),
            routing: Some(&routing),
            workspace: &mut workspace,
        }
        .enqueue(&bench.kernels, &bench.stream)
    });
    let kernel = if is_skinny { "skinny" } else { "tile, by shape" };
    row(name, &weights[0], columns, kernel, [chosen, generic]);
}

/// The first product of an expert takes tokens and gathers, which the chosen kernel does itself or through `GatherRows`: that is
/// part of the time. The second one's rows lie in the order of slots.
fn experts(bench: &Bench, name: &str, weights: &PackedWeights, num_experts: usize, tokens: usize) {
    let [rows, k] = weights.shape();
    let is_first = rows == 2 * HIDDEN;
    let out_rows = if is_first { rows / 2 } else { rows };
    let slots = tokens * TOP;
    let (x, bias) = (bench.values(tokens * k), bench.values(num_experts * rows));
    let (mut by_slot, mut out) = (bench.values(slots * k), bench.zeros::<bf16>(slots * out_rows));
    let mut workspace = Workspace::new(&bench.stream).unwrap();
    let tile = expert_tile(weights.format(), slots, num_experts);
    let mut time = |tile_slots: usize| {
        let routing = routed(bench, tokens, num_experts, tile_slots, 0).routing;
        bench.time(4, |_| {
            let output = out.view_mut();
            let out = if is_first { Output::SwiGlu(output) } else { Output::Bf16(output) };
            let (bias, workspace) = (Some(bias.view()), &mut workspace);
            if EXPERT_TILES[..SKINNY_TILES].contains(&tile_slots) {
                let x = if is_first { x.view() } else { by_slot.view() };
                let routing = Some(Grouped { routing: &routing, gather: is_first, settled: !is_first });
                return SkinnyGemm { weights, x, bias, out, routing, workspace }.enqueue(&bench.kernels, &bench.stream);
            }
            if is_first {
                GatherRows { x: x.view(), routing: &routing, out: by_slot.view_mut(), hidden: k }
                    .enqueue(&bench.kernels, &bench.stream)?;
            }
            let (x, routing) = (by_slot.view(), Some(&routing));
            TileGemm { weights, x, bias, out, routing, workspace }.enqueue(&bench.kernels, &bench.stream)
        })
    };
    let us = [time(EXPERT_TILES[tile]), time(GENERIC_TILE)];
    row(name, weights, tokens, &format!("tiles of {}", EXPERT_TILES[tile]), us);
}
