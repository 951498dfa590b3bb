//! Router: logits, picks, ties and the two roundings.

use half::bf16;
use kernels::{ChooseExperts, Dispatch, ExpertWeights, Router, RouterDispatch, Routing};
use model::reference;

use crate::gpu::{BF16_ROUNDING, Gpu, Random, compare, magnitudes, sum_error, widen};

const TOP: usize = 4;

struct Routed {
    logits: Vec<f32>,
    experts: Vec<i32>,
    weights: Vec<f32>,
}

fn route(gpu: &Gpu, x: &[bf16], weight: &[bf16], bias: &[bf16], mode: ExpertWeights) -> Routed {
    let tokens = x.len() / (weight.len() / bias.len());
    let (x, weight, device_bias) = (gpu.upload(x), gpu.upload(weight), gpu.upload(bias));
    let mut experts = gpu.poisoned::<i32>(tokens * TOP);
    let mut weights = gpu.poisoned::<f32>(tokens * TOP);
    let mut logits = gpu.poisoned::<f32>(tokens * bias.len());
    Router {
        x: x.view(),
        weight: weight.view(),
        bias: device_bias.view(),
        present: None,
        experts: experts.view_mut(),
        weights: weights.view_mut(),
        logits: Some(logits.view_mut()),
        top: TOP,
        mode,
        dispatch: None,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    let stream = &gpu.stream;
    Routed {
        logits: stream.download(logits.view()).unwrap(),
        experts: stream.download(experts.view()).unwrap(),
        weights: stream.download(weights.view()).unwrap(),
    }
}

/// The picks must be exactly those of the logits that the kernel itself reports; the logits must be right.
fn check(case: &str, tokens: usize, num_experts: usize, k: usize, mode: ExpertWeights) {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let x = random.bf16(tokens * k, 1.0);
    let weight = random.bf16(num_experts * k, 0.05);
    let bias = random.bf16(num_experts, 0.5);
    let got = route(&gpu, &x, &weight, &bias, mode);

    let (wide_x, wide_weight, wide_bias) = (widen(&x), widen(&weight), widen(&bias));
    let rows = || wide_x.chunks(k);
    let want: Vec<f32> = rows().flat_map(|row| reference::linear(row, &wide_weight, Some(&wide_bias))).collect();
    let magnitude: Vec<f32> = rows().flat_map(|row| magnitudes(row, &wide_weight)).collect();
    compare(case, &got.logits, &want, num_experts, |want, i| sum_error(k) * magnitude[i] + want.abs() * 1e-6);
    for token in 0..tokens {
        let mut logits = got.logits[token * num_experts..][..num_experts].to_vec();
        if mode == ExpertWeights::Bf16 {
            logits.iter_mut().for_each(|logit| *logit = bf16::from_f32(*logit).to_f32());
        }
        let want = reference::route(&logits, TOP);
        let picks: Vec<i32> = want.iter().map(|routed| routed.expert as i32).collect();
        assert_eq!(got.experts[token * TOP..][..TOP], picks, "{case}: experts of token {token}");
        let shares: Vec<f32> = want.iter().map(|routed| routed.weight).collect();
        let rounding = if mode == ExpertWeights::Bf16 { BF16_ROUNDING } else { 0.0 };
        compare(case, &got.weights[token * TOP..][..TOP], &shares, TOP, |want, _| want * (rounding + 1e-6));
    }
}

/// What the router dispatches itself must be what `Dispatch` makes of its picks, for a rank with `local` experts from `first` on.
fn check_dispatch(case: &str, tokens: usize, num_experts: usize, first_expert: usize, local: usize) {
    const K: usize = 2880;
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (x, weight) = (gpu.upload(&random.bf16(tokens * K, 1.0)), gpu.upload(&random.bf16(num_experts * K, 0.05)));
    let bias = gpu.upload(&random.bf16(num_experts, 0.5));
    let (mut experts, mut weights) = (gpu.poisoned::<i32>(tokens * TOP), gpu.poisoned::<f32>(tokens * TOP));
    let routing = || Routing::new(&gpu.stream, tokens, TOP, local, 8).unwrap();
    let (mut got, mut want) = (routing(), routing());
    got.offsets = gpu.poisoned(local + 1);
    got.slot = gpu.poisoned(tokens * TOP);
    Router {
        x: x.view(),
        weight: weight.view(),
        bias: bias.view(),
        present: None,
        experts: experts.view_mut(),
        weights: weights.view_mut(),
        logits: None,
        top: TOP,
        mode: ExpertWeights::F32,
        dispatch: Some(RouterDispatch { first_expert, routing: &mut got }),
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    Dispatch { experts: experts.view(), first_expert, routing: &mut want }.enqueue(&gpu.kernels, &gpu.stream).unwrap();
    let stream = &gpu.stream;
    let facts = |routing: &Routing| {
        let offsets = stream.download(routing.offsets.view()).unwrap();
        let tiles = stream.download(routing.num_tiles.view()).unwrap()[0] as usize;
        let slots = offsets[local] as usize;
        (
            stream.download(routing.slot.view()).unwrap(),
            stream.download(routing.gather.slice(..slots)).unwrap(),
            stream.download(routing.tiles.slice(..tiles)).unwrap(),
            offsets,
        )
    };
    assert_eq!(facts(&got), facts(&want), "{case}");
}

#[test]
fn few_tokens_are_dispatched_on_the_way() {
    check_dispatch("one token", 1, 32, 0, 32);
    check_dispatch("eight tokens that share experts", 8, 8, 0, 8);
    check_dispatch("eight tokens of 120b", 8, 128, 0, 128);
    check_dispatch("a rank with few of the experts", 5, 32, 24, 8);
    check_dispatch("a rank that is not visited", 1, 128, 127, 1);
}

#[test]
fn one_token_of_20b() {
    check("20b", 1, 32, 2880, ExpertWeights::Bf16);
}

#[test]
fn one_token_of_120b() {
    check("120b", 1, 128, 2880, ExpertWeights::F32);
}

#[test]
fn a_tail_of_tokens() {
    check("tail", 67, 128, 2880, ExpertWeights::Bf16);
    check("tail", 9, 32, 2880, ExpertWeights::F32);
}

#[test]
fn fewer_experts_than_a_strip() {
    check("nano", 5, 8, 320, ExpertWeights::F32);
}

#[test]
fn equal_logits_go_to_the_lowest_index() {
    let Some(gpu) = Gpu::open() else { return };
    let zeros = vec![bf16::ZERO; 128 * 2880];
    let mut bias = vec![bf16::ZERO; 128];
    bias[77] = bf16::ONE;
    let got = route(&gpu, &zeros[..2880], &zeros, &bias, ExpertWeights::F32);
    assert_eq!(got.experts, [77, 0, 1, 2]);
}

#[test]
fn rounding_decides_between_near_equals() {
    let Some(gpu) = Gpu::open() else { return };
    // 256.25 and 256.5 are both 256 in bf16, so the lower index wins only when rounded.
    let k = 32;
    let mut x = vec![bf16::ZERO; k];
    x[0] = bf16::ONE;
    let mut weight = vec![bf16::ZERO; 8 * k];
    weight[2 * k] = bf16::from_f32(0.25);
    weight[5 * k] = bf16::from_f32(0.5);
    let mut bias = vec![bf16::ZERO; 8];
    (bias[2], bias[5]) = (bf16::from_f32(256.0), bf16::from_f32(256.0));
    let picks = |mode| route(&gpu, &x, &weight, &bias, mode).experts[..2].to_vec();
    assert_eq!(picks(ExpertWeights::Bf16), [2, 5]);
    assert_eq!(picks(ExpertWeights::F32), [5, 2]);
}

#[test]
fn the_choice_alone_agrees() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    for num_experts in [8, 32, 128] {
        let tokens = 77;
        let (x, weight) = (random.bf16(tokens * 320, 1.0), random.bf16(num_experts * 320, 0.05));
        let bias = random.bf16(num_experts, 0.5);
        let want = route(&gpu, &x, &weight, &bias, ExpertWeights::Bf16);
        let mut logits = gpu.upload(&want.logits);
        let (mut experts, mut weights) = (gpu.poisoned::<i32>(tokens * TOP), gpu.poisoned::<f32>(tokens * TOP));
        ChooseExperts {
            logits: logits.view_mut(),
            num_experts,
            present: None,
            experts: experts.view_mut(),
            weights: weights.view_mut(),
            top: TOP,
            mode: ExpertWeights::Bf16,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
        assert_eq!(gpu.stream.download(experts.view()).unwrap(), want.experts);
        assert_eq!(gpu.stream.download(weights.view()).unwrap(), want.weights);
    }
}

/// Tokens that only fill a batch up: they choose expert -1 with weight 0, which is dispatched nowhere, and the others choose as ever.
#[test]
fn absent_tokens_choose_nothing() {
    const K: usize = 2880;
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    for tokens in [7, 50] {
        let (x, weight) = (random.bf16(tokens * K, 1.0), random.bf16(32 * K, 0.05));
        let bias = random.bf16(32, 0.5);
        let all = route(&gpu, &x, &weight, &bias, ExpertWeights::Bf16);
        let present: Vec<i32> = (0..tokens).map(|token| i32::from(token % 3 != 1)).collect();
        let masked = |values: &[i32]| -> Vec<i32> {
            values.iter().enumerate().map(|(i, pick)| if present[i / TOP] == 0 { -1 } else { *pick }).collect()
        };
        let [device_x, device_weight, device_bias] = [&x, &weight, &bias].map(|values| gpu.upload(values));
        let device_present = gpu.upload(&present);
        let (mut experts, mut weights) = (gpu.poisoned::<i32>(tokens * TOP), gpu.poisoned::<f32>(tokens * TOP));
        let mut routing = Routing::new(&gpu.stream, tokens, TOP, 32, 8).unwrap();
        let dispatches = tokens <= kernels::DISPATCH_TOKENS;
        let dispatch = dispatches.then_some(RouterDispatch { first_expert: 0, routing: &mut routing });
        Router {
            x: device_x.view(),
            weight: device_weight.view(),
            bias: device_bias.view(),
            present: Some(device_present.view()),
            experts: experts.view_mut(),
            weights: weights.view_mut(),
            logits: None,
            top: TOP,
            mode: ExpertWeights::Bf16,
            dispatch,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
        let picks = gpu.stream.download(experts.view()).unwrap();
        assert_eq!(picks, masked(&all.experts), "{tokens} tokens");
        let shares = gpu.stream.download(weights.view()).unwrap();
        for (i, share) in shares.iter().enumerate() {
            let want = if present[i / TOP] == 0 { 0.0 } else { all.weights[i] };
            assert_eq!(*share, want, "weight {i} of {tokens} tokens");
        }
        if !dispatches {
            let experts = experts.view();
            Dispatch { experts, first_expert: 0, routing: &mut routing }.enqueue(&gpu.kernels, &gpu.stream).unwrap();
        }
        let slots = gpu.stream.download(routing.slot.view()).unwrap();
        assert!(slots.iter().zip(&picks).all(|(slot, pick)| (*slot < 0) == (*pick < 0)), "{tokens} tokens: {slots:?}");
        let offsets = gpu.stream.download(routing.offsets.view()).unwrap();
        assert_eq!(offsets[32] as usize, picks.iter().filter(|pick| **pick >= 0).count(), "{tokens} tokens");

        let mut logits = gpu.upload(&all.logits);
        ChooseExperts {
            logits: logits.view_mut(),
            num_experts: 32,
            present: Some(device_present.view()),
            experts: experts.view_mut(),
            weights: weights.view_mut(),
            top: TOP,
            mode: ExpertWeights::Bf16,
        }
        .enqueue(&gpu.kernels, &gpu.stream)
        .unwrap();
        assert_eq!(gpu.stream.download(experts.view()).unwrap(), picks, "{tokens} tokens, the choice alone");
        assert_eq!(gpu.stream.download(weights.view()).unwrap(), shares, "{tokens} tokens, the choice alone");
    }
}
