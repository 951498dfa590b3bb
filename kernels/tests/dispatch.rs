//! Dispatch against a sort.

use kernels::{Dispatch, Routing};

use crate::gpu::{Gpu, Random};

const TOP: usize = 4;

/// Distinct experts for each token, as a router gives them.
fn distinct(random: &mut Random, tokens: usize, num_experts: usize) -> Vec<i32> {
    let mut pairs = Vec::new();
    for _ in 0..tokens {
        let mut row: Vec<i32> = Vec::new();
        while row.len() < TOP {
            let expert = random.below(num_experts) as i32;
            if !row.contains(&expert) {
                row.push(expert);
            }
        }
        pairs.extend(row);
    }
    pairs
}

fn check(case: &str, experts: &[i32], first_expert: usize, num_experts: usize, tile_slots: usize) {
    let Some(gpu) = Gpu::open() else { return };
    let tokens = experts.len() / TOP;
    let mut routing = Routing::new(&gpu.stream, tokens, TOP, num_experts, tile_slots).unwrap();
    let device_experts = gpu.upload(experts);
    Dispatch { experts: device_experts.view(), first_expert, routing: &mut routing }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();

    let local = |expert: i32| expert - first_expert as i32;
    let mut order: Vec<usize> =
        (0..experts.len()).filter(|pair| (0..num_experts as i32).contains(&local(experts[*pair]))).collect();
    order.sort_by_key(|pair| (local(experts[*pair]), *pair));
    let mut slot = vec![-1; experts.len()];
    for (place, pair) in order.iter().enumerate() {
        slot[*pair] = place as i32;
    }
    let mut offsets = vec![0];
    let mut tiles = Vec::new();
    for expert in 0..num_experts as i32 {
        let (first, count) =
            (offsets[expert as usize], order.iter().filter(|pair| local(experts[**pair]) == expert).count());
        for done in (0..count).step_by(tile_slots) {
            tiles.push([expert, first + done as i32, tile_slots.min(count - done) as i32, 0]);
        }
        offsets.push(first + count as i32);
    }
    let stream = &gpu.stream;
    assert_eq!(stream.download(routing.slot.view()).unwrap(), slot, "{case}: slot");
    let gather: Vec<i32> = order.iter().map(|pair| (pair / TOP) as i32).collect();
    assert_eq!(stream.download(routing.gather.slice(..order.len())).unwrap(), gather, "{case}: gather");
    assert_eq!(stream.download(routing.offsets.view()).unwrap(), offsets, "{case}: offsets");
    assert_eq!(stream.download(routing.num_tiles.view()).unwrap(), [tiles.len() as i32], "{case}: tiles");
    assert_eq!(stream.download(routing.tiles.slice(..tiles.len())).unwrap(), tiles, "{case}: tiles");
}

#[test]
fn one_token() {
    check("one token", &[31, 0, 7, 8], 0, 32, 8);
}

#[test]
fn a_batch() {
    let mut random = Random::new();
    check("20b", &distinct(&mut random, 128, 32), 0, 32, 16);
    check("120b", &distinct(&mut random, 61, 128), 0, 128, 8);
}

#[test]
fn a_long_prompt() {
    let mut random = Random::new();
    check("prompt", &distinct(&mut random, 8192, 128), 0, 128, 128);
    check("prompt", &distinct(&mut random, 1025, 8), 0, 8, 64);
}

#[test]
fn experts_of_other_ranks() {
    let mut random = Random::new();
    let experts = distinct(&mut random, 40, 128);
    for rank in 0..4 {
        check("rank", &experts, rank * 32, 32, 16);
    }
}

#[test]
fn all_tokens_to_the_same_experts() {
    check("same", &[3, 9, 12, 30].repeat(100), 0, 32, 16);
}

#[test]
fn no_local_expert_is_picked() {
    check("none", &[3, 9, 12, 30].repeat(5), 32, 32, 8);
}
