use std::cell::RefCell;

use types::ParallelLayout;

use super::*;

fn layouts() -> impl Iterator<Item = ParallelLayout> {
    [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (2, 4, 2), (1, 2, 2)]
        .into_iter()
        .map(|(tp, ep, dp)| ParallelLayout { tp, ep, dp })
}

fn load_all(checkpoint: &Checkpoint, layout: ParallelLayout) -> Vec<RankWeights> {
    ShardPlan::all(checkpoint.config(), layout)
        .expect("a legal layout")
        .iter()
        .map(|plan| load_rank(checkpoint, plan, &|_, _| ()).expect("nano loads"))
        .collect()
}

fn mx(matrix: &ExpertMatrix) -> &MxMatrix {
    match matrix {
        ExpertMatrix::Mxfp4(matrix) => matrix,
        ExpertMatrix::Fp8(_) => panic!("nano has mxfp4 experts"),
    }
}

/// Columns of all ranks put side by side.
fn side_by_side<T: Copy>(parts: &[(&[T], usize)], rows: usize) -> Vec<T> {
    (0..rows).flat_map(|row| parts.iter().flat_map(move |(part, cols)| &part[row * cols..][..*cols])).copied().collect()
}

#[test]
fn ranks_together_hold_the_model() {
    let checkpoint = Checkpoint::embedded_nano();
    let whole = load_all(&checkpoint, ParallelLayout::tp(1)).swap_remove(0);
    for layout in layouts() {
        let ranks = load_all(&checkpoint, layout);
        for group in ranks.chunks(layout.tp as usize) {
            check_dense(&whole, group);
        }
        for layer in 0..whole.layers.len() {
            check_experts(&whole.layers[layer], layer, &ranks);
        }
    }
}

fn check_dense(whole: &RankWeights, group: &[RankWeights]) {
    let case = group[0].plan.layout;
    let head: Vec<bf16> = group.iter().flat_map(|rank| rank.head.values.to_vec()).collect();
    assert_eq!(head, *whole.head.values, "{case}: head");
    for rank in group {
        assert_eq!(*rank.embedding.values, *whole.embedding.values, "{case}: embedding");
        assert_eq!(*rank.final_norm, *whole.final_norm, "{case}: final norm");
    }
    for (layer, expected) in whole.layers.iter().enumerate() {
        let parts: Vec<&LayerWeights> = group.iter().map(|rank| &rank.layers[layer]).collect();
        type Pick = fn(&LayerWeights) -> &Linear;
        for (name, pick) in [("q", (|l| &l.q) as Pick), ("k", |l| &l.k), ("v", |l| &l.v)] {
            let weight: Vec<bf16> = parts.iter().flat_map(|part| pick(part).weight.values.to_vec()).collect();
            let bias: Vec<bf16> = parts.iter().flat_map(|part| pick(part).bias.to_vec()).collect();
            assert_eq!(weight, *pick(expected).weight.values, "{case}: {name} weight of layer {layer}");
            assert_eq!(bias, *pick(expected).bias, "{case}: {name} bias of layer {layer}");
        }
        let sinks: Vec<bf16> = parts.iter().flat_map(|part| part.sinks.to_vec()).collect();
        assert_eq!(sinks, *expected.sinks, "{case}: sinks of layer {layer}");
        let columns: Vec<(&[bf16], usize)> =
            parts.iter().map(|part| (&*part.o.weight.values, part.o.weight.cols)).collect();
        let o = side_by_side(&columns, expected.o.weight.rows);
        assert_eq!(o, *expected.o.weight.values, "{case}: o weight of layer {layer}");
        for part in parts {
            assert_eq!(*part.o.bias, *expected.o.bias, "{case}: o bias of layer {layer}");
            assert_eq!(*part.router.weight.values, *expected.router.weight.values, "{case}: router of layer {layer}");
            assert_eq!(*part.router.bias, *expected.router.bias, "{case}: router bias of layer {layer}");
            assert_eq!(*part.attn_norm, *expected.attn_norm, "{case}: attn norm of layer {layer}");
            assert_eq!(*part.mlp_norm, *expected.mlp_norm, "{case}: mlp norm of layer {layer}");
        }
    }
}

fn check_experts(whole: &LayerWeights, layer: usize, ranks: &[RankWeights]) {
    let case = ranks[0].plan.layout;
    for (expert, expected) in whole.experts.iter().enumerate() {
        let parts: Vec<&ExpertWeights> = ranks
            .iter()
            .filter(|rank| rank.plan.experts.contains(&expert))
            .map(|rank| &rank.layers[layer].experts[expert - rank.plan.experts.start])
            .collect();
        assert_eq!(parts.len(), case.expert_tp() as usize, "{case}: owners of expert {expert}");
        let gate_up: Vec<bf16> = parts.iter().flat_map(|part| part.gate_up.dequantize()).collect();
        assert_eq!(gate_up, expected.gate_up.dequantize(), "{case}: gate_up {layer}.{expert}");
        let bias: Vec<bf16> = parts.iter().flat_map(|part| part.gate_up_bias.to_vec()).collect();
        assert_eq!(bias, *expected.gate_up_bias, "{case}: gate_up bias {layer}.{expert}");
        let down: Vec<Vec<bf16>> = parts.iter().map(|part| part.down.dequantize()).collect();
        let columns: Vec<(&[bf16], usize)> =
            down.iter().zip(&parts).map(|(values, part)| (values.as_slice(), part.down.cols())).collect();
        let down = side_by_side(&columns, expected.down.rows());
        assert_eq!(down, expected.down.dequantize(), "{case}: down {layer}.{expert}");
        for part in parts {
            assert_eq!(*part.down_bias, *expected.down_bias, "{case}: down bias {layer}.{expert}");
        }
    }
}

#[test]
fn the_whole_model_is_not_copied() {
    let checkpoint = Checkpoint::embedded_nano();
    let rank = load_all(&checkpoint, ParallelLayout::tp(1)).swap_remove(0);
    let embedded = crate::nano::weights().as_ptr_range();
    for layer in &rank.layers {
        assert!(
            layer.o.weight.values.is_mapped() && layer.experts.iter().all(|expert| mx(&expert.down).blocks.is_mapped())
        );
        assert!(embedded.contains(&mx(&layer.experts[7].gate_up).blocks.as_ptr()));
    }
    let split = load_all(&checkpoint, ParallelLayout::tp(2));
    let layer = &split[1].layers[3];
    assert!(
        layer.q.weight.values.is_mapped() && mx(&layer.experts[0].gate_up).blocks.is_mapped(),
        "rows are one piece"
    );
    assert!(!layer.o.weight.values.is_mapped() && !mx(&layer.experts[0].down).scales.is_mapped(), "columns are not");
}

#[test]
fn progress_ends_at_the_total() {
    let checkpoint = Checkpoint::embedded_nano();
    for layout in layouts() {
        for plan in ShardPlan::all(checkpoint.config(), layout).expect("a legal layout") {
            let calls = RefCell::new(Vec::new());
            load_rank(&checkpoint, &plan, &|done, total| calls.borrow_mut().push((done, total))).expect("nano loads");
            let calls = calls.into_inner();
            let total = rank_bytes(checkpoint.config(), &plan);
            assert!(calls.iter().all(|call| call.1 == total), "{layout}");
            assert!(calls.windows(2).all(|pair| pair[0].0 < pair[1].0), "{layout}");
            assert_eq!(calls.last().map(|call| call.0), Some(total), "{layout} rank {}", plan.rank);
        }
    }
}

#[test]
fn sizes_of_the_released_models() {
    // 20b: 12.8 GiB of tensors in the released files.
    let config = ModelConfig::gpt_oss_20b();
    let plan = ShardPlan::new(&config, ParallelLayout::tp(1), 0).expect("one rank");
    assert_eq!(rank_bytes(&config, &plan) / 10_000_000, 1376);
}

#[test]
fn rows_dequantise_like_the_matrix() {
    let checkpoint = Checkpoint::embedded_nano();
    let rank = load_all(&checkpoint, ParallelLayout::tp(4)).swap_remove(1);
    let down = &rank.layers[2].experts[5].down;
    let all = down.dequantize();
    let mut row = vec![0.0; down.cols()];
    for i in 0..down.rows() {
        down.row_f32(i, &mut row);
        let expected: Vec<f32> = all[i * down.cols()..][..down.cols()].iter().map(|value| value.to_f32()).collect();
        assert_eq!(row, expected, "row {i}");
    }
}
