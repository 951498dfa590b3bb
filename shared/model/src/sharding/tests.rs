use super::*;
use crate::checkpoint::Checkpoint;

fn lengths(units: usize, parts: usize) -> Vec<usize> {
    split(units, parts).iter().map(ExactSizeIterator::len).collect()
}

fn layout(tp: u32, ep: u32, dp: u32) -> ParallelLayout {
    ParallelLayout { tp, ep, dp }
}

fn nano() -> ModelConfig {
    Checkpoint::embedded_nano().config().clone()
}

#[test]
fn splits_of_the_known_models() {
    assert_eq!(lengths(10, 8), [2, 1, 1, 1, 2, 1, 1, 1]);
    assert_eq!(lengths(10, 4), [3, 2, 3, 2]);
    assert_eq!(lengths(90, 2), [45, 45]);
    assert_eq!(lengths(90, 4), [23, 22, 23, 22]);
    assert_eq!(lengths(90, 8), [12, 11, 11, 11, 12, 11, 11, 11]);
    assert_eq!(lengths(1571, 4), [393, 393, 393, 392]);
    assert_eq!(lengths(3, 8), [1, 0, 1, 0, 1, 0, 0, 0]);
    assert_eq!(lengths(0, 2), [0, 0]);
}

#[test]
fn split_covers_and_nests() {
    for units in 0..300 {
        let finest = split(units, REDUCTION_SLICES);
        for parts in [1, 2, 4, 8] {
            let ranges = split(units, parts);
            assert_eq!(ranges.len(), parts);
            assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, units));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{units} over {parts}: {ranges:?}");
            for (i, range) in ranges.iter().enumerate() {
                let slices = &finest[i * REDUCTION_SLICES / parts..(i + 1) * REDUCTION_SLICES / parts];
                assert_eq!(range.start, slices[0].start, "{units} over {parts}");
                assert_eq!(range.end, slices[slices.len() - 1].end, "{units} over {parts}");
            }
        }
    }
}

#[test]
fn default_decode_layout_of_120b() {
    let plans = ShardPlan::all(&ModelConfig::gpt_oss_120b(), layout(4, 4, 1)).expect("the stated default");
    let last = &plans[3];
    assert_eq!((last.tp_rank, last.ep_rank, last.expert_tp_rank, last.dp_rank), (3, 3, 0, 0));
    assert_eq!((last.heads.clone(), last.kv_heads.clone()), (48..64, 6..8));
    assert_eq!(last.experts, 96..128);
    assert_eq!(last.units, 0..2880);
    assert_eq!(last.vocab_rows, 1179 * 128..1571 * 128);
    assert_eq!((last.attention_slices.clone(), last.expert_slices.clone()), (6..8, 0..8));
}

#[test]
fn expert_tensor_parallelism_cuts_at_blocks() {
    let plans = ShardPlan::all(&nano(), ParallelLayout::tp(4)).expect("nano has 4 kv heads");
    let units: Vec<_> = plans.iter().map(|plan| plan.units.clone()).collect();
    assert_eq!(units, [0..96, 96..160, 160..256, 256..320]);
    assert!(plans.iter().all(|plan| plan.experts == (0..8)));
    assert_eq!(plans[2].expert_slices, 4..6);
    assert_eq!((plans[2].expert_slice_units(4), plans[2].expert_slice_units(5)), (160..224, 224..256));
    assert_eq!(plans[1].vocab_rows, 512..1024);
}

#[test]
fn two_attention_groups_share_the_experts() {
    let config = ModelConfig::gpt_oss_20b();
    let plans = ShardPlan::all(&config, layout(2, 4, 2)).expect("4 ranks");
    let places: Vec<_> = plans.iter().map(|plan| (plan.dp_rank, plan.tp_rank, plan.ep_rank)).collect();
    assert_eq!(places, [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]);
    assert_eq!(plans[1].heads, plans[3].heads);
    assert_eq!(plans[3].experts, 24..32);
    // EP2 over the same ranks: neighbours share experts.
    let plans = ShardPlan::all(&config, layout(2, 2, 2)).expect("4 ranks");
    let places: Vec<_> = plans.iter().map(|plan| (plan.ep_rank, plan.expert_tp_rank, plan.units.clone())).collect();
    assert_eq!(places, [(0, 0, 0..1440), (0, 1, 1440..2880), (1, 0, 0..1440), (1, 1, 1440..2880)]);
}

/// Under every legal layout each head, vocabulary row and (expert, unit) has exactly one owner within an attention
/// group or instance, and what a rank owns is what its slices cover.
#[test]
fn every_part_has_one_owner() {
    let mut odd = nano();
    (odd.vocab_size, odd.intermediate_size) = (1000, 9 * 32);
    for config in [nano(), odd, ModelConfig::gpt_oss_20b(), ModelConfig::gpt_oss_120b()] {
        let mut legal = 0;
        for (tp, dp) in [1, 2, 4, 8].into_iter().flat_map(|tp| [1, 2].map(|dp| (tp, dp))) {
            for ep in [1, 2, 4, 8, 16] {
                let Ok(plans) = ShardPlan::all(&config, layout(tp, ep, dp)) else { continue };
                legal += 1;
                check_ownership(&config, &plans);
            }
        }
        assert!(legal >= 10, "only {legal} layouts were legal");
    }
}

fn check_ownership(config: &ModelConfig, plans: &[ShardPlan]) {
    let case = plans[0].layout;
    let mut units = vec![0; config.num_experts * config.intermediate_size];
    let (mut heads, mut rows) = (vec![0; config.num_heads], vec![0; config.vocab_size]);
    for plan in plans {
        for expert in plan.experts.clone() {
            plan.units.clone().for_each(|unit| units[expert * config.intermediate_size + unit] += 1);
        }
        plan.heads.clone().for_each(|head| heads[head] += 1);
        plan.vocab_rows.clone().for_each(|row| rows[row] += 1);
        assert_eq!(plan.heads.start, plan.kv_heads.start * config.group_size(), "{case}");
        assert_eq!(plan.heads.end, plan.kv_heads.end * config.group_size(), "{case}");
        let sliced =
            |slices: &Range<usize>, of: &dyn Fn(usize) -> Range<usize>| slices.clone().flat_map(of).collect::<Vec<_>>();
        let slice_heads = sliced(&plan.attention_slices, &|slice| plan.attention_slice_heads(slice));
        assert_eq!(slice_heads, plan.heads.clone().collect::<Vec<_>>(), "{case}");
        let slice_units = sliced(&plan.expert_slices, &|slice| plan.expert_slice_units(slice));
        assert_eq!(slice_units, plan.units.clone().collect::<Vec<_>>(), "{case}");
    }
    let dp = case.dp as usize;
    assert!(units.iter().all(|&owners| owners == 1), "{case}: experts");
    assert!(heads.iter().chain(&rows).all(|&owners| owners == dp), "{case}: heads and head rows");
}

#[test]
fn limits_are_named() {
    let nano = nano();
    for (tp, ep, dp, message) in [
        (8, 8, 1, "tp 8 does not divide the model's 4 kv heads"),
        (3, 3, 1, "tp is 3, supported are powers of two up to 8"),
        (16, 16, 1, "tp is 16, supported are powers of two up to 8"),
        (4, 3, 1, "layout EP3 DP1 TP4: ep must divide the 4 ranks (tp x dp)"),
        (4, 16, 4, "ep 16 does not divide the model's 8 experts"),
        (4, 1, 4, "expert tp (tp x dp / ep) is 16, supported are powers of two up to 8"),
        (0, 1, 1, "layout EP1 DP1 TP0: each degree is at least 1"),
        (
            u32::MAX,
            1,
            u32::MAX,
            "layout EP1 DP4294967295 TP4294967295: ep must divide the 18446744065119617025 ranks (tp x dp)",
        ),
    ] {
        let error = ShardPlan::all(&nano, layout(tp, ep, dp)).expect_err(message);
        assert_eq!(error.to_string(), message);
    }
    let mut narrow = nano;
    narrow.intermediate_size = 64;
    assert_eq!(
        ShardPlan::new(&narrow, ParallelLayout::tp(4), 0).expect_err("2 blocks").to_string(),
        "the model has 2 mx blocks of the intermediate size, too few for 4 ranks"
    );
    assert_eq!(
        ShardPlan::new(&narrow, ParallelLayout::tp(2), 2).expect_err("ranks 0 and 1").to_string(),
        "rank 2 does not exist, the layout has 2 ranks"
    );
}
