use types::Sampling;

use super::*;

fn slot(sampling: Sampling, prompt: &[TokenId], generated: &[TokenId]) -> SlotSampler {
    let (sampling, prompt, generated) = (Arc::new(sampling), Arc::from(prompt), generated.to_vec());
    SlotSampler::new(&SlotBinding { slot: types::SlotId(0), sampling, prompt, generated })
}

fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..Sampling::default() }
}

fn draw_once(sampling: Sampling, logits: &[f32]) -> SampledToken {
    Sampler::default().sample(&mut slot(sampling, &[], &[]), &mut logits.to_vec(), None)
}

/// Draws `draws` tokens with as many seeds and compares the counts with `expected` probabilities by Pearson's chi-squared statistic.
fn assert_distribution(sampling: &Sampling, logits: &[f32], expected: &[f64]) {
    let draws = 40_000;
    let mut counts = vec![0u32; logits.len()];
    let mut sampler = Sampler::default();
    for seed in 0..draws {
        let mut slot = slot(Sampling { seed, ..sampling.clone() }, &[], &[]);
        counts[sampler.sample(&mut slot, &mut logits.to_vec(), None).token as usize] += 1;
    }
    let (mut statistic, mut freedom) = (0.0, -1.0);
    for (token, (&count, &probability)) in counts.iter().zip(expected).enumerate() {
        if probability == 0.0 {
            assert_eq!(count, 0, "token {token} must not come out");
            continue;
        }
        let wanted = probability * draws as f64;
        statistic += (f64::from(count) - wanted).powi(2) / wanted;
        freedom += 1.0;
    }
    // The statistic has mean `freedom` and variance `2 freedom`; five deviations off is a fault, and the seeds are fixed.
    assert!(statistic < freedom + 5.0 * (2.0f64 * freedom).sqrt() + 5.0, "chi-squared {statistic}, counts {counts:?}");
}

/// `exp(logit / temperature)` over the tokens in `keep`, normalised.
fn softmax(logits: &[f32], temperature: f64, keep: &[usize]) -> Vec<f64> {
    let mut p = vec![0.0; logits.len()];
    keep.iter().for_each(|token| p[*token] = (f64::from(logits[*token]) / temperature).exp());
    let total: f64 = p.iter().sum();
    p.iter().map(|p| p / total).collect()
}

/// Probabilities 0.1, 0.4, 0.2, 0.05, 0.25.
fn five() -> Vec<f32> {
    [0.1f32, 0.4, 0.2, 0.05, 0.25].map(|p| p.ln() + 3.0).to_vec()
}

#[test]
fn temperature_zero_takes_the_best_and_the_lowest_id_among_equals() {
    assert_eq!(draw_once(greedy(), &[1.0, 7.0, 7.0, -2.0]).token, 1);
    assert_eq!(draw_once(greedy(), &[-0.0, 0.0]).token, 0);
}

#[test]
fn plain_draws_follow_the_distribution() {
    assert_distribution(&Sampling::default(), &five(), &[0.1, 0.4, 0.2, 0.05, 0.25]);
}

#[test]
fn a_large_vocabulary_is_drawn_from_evenly_over_its_blocks() {
    // 1,000 tokens over several blocks; every 100th is 50 times as probable as the rest.
    let logits: Vec<f32> = (0..1000).map(|token| if token % 100 == 7 { 50.0f32.ln() } else { 0.0 }).collect();
    assert_distribution(&Sampling::default(), &logits, &softmax(&logits, 1.0, &(0..1000).collect::<Vec<_>>()));
}

#[test]
fn temperature_flattens_or_sharpens() {
    for temperature in [0.5, 2.0] {
        let sampling = Sampling { temperature, ..Sampling::default() };
        assert_distribution(&sampling, &five(), &softmax(&five(), f64::from(temperature), &[0, 1, 2, 3, 4]));
    }
}

#[test]
fn top_k_keeps_the_most_probable() {
    let sampling = Sampling { top_k: 2, ..Sampling::default() };
    assert_distribution(&sampling, &five(), &softmax(&five(), 1.0, &[1, 4]));
}

#[test]
fn top_k_cuts_equals_by_id() {
    let sampling = Sampling { top_k: 2, ..Sampling::default() };
    assert_distribution(&sampling, &[1.0, 2.0, 1.0, 1.0], &softmax(&[1.0, 2.0, 1.0, 1.0], 1.0, &[0, 1]));
}

#[test]
fn top_p_keeps_the_token_that_crosses_it() {
    // 0.4 + 0.25 = 0.65 does not reach 0.7; with 0.2 it does.
    let sampling = Sampling { top_p: 0.7, ..Sampling::default() };
    assert_distribution(&sampling, &five(), &softmax(&five(), 1.0, &[1, 4, 2]));
}

#[test]
fn top_p_counts_the_mass_that_top_k_left() {
    // Of the best three (0.4, 0.25, 0.2; together 0.85) the first two have 0.76 of the mass, though 0.65 of the whole.
    let sampling = Sampling { top_k: 3, top_p: 0.75, ..Sampling::default() };
    assert_distribution(&sampling, &five(), &softmax(&five(), 1.0, &[1, 4]));
}

#[test]
fn top_p_of_a_flat_distribution_sorts_beyond_the_first_candidates() {
    let logits: Vec<f32> = (0..700).map(|token| (token % 7) as f32 * 1e-3).collect();
    let mut order: Vec<usize> = (0..700).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let p = softmax(&logits, 1.0, &(0..700).collect::<Vec<_>>());
    let mut mass = 0.0;
    let below = |token: &usize| {
        let before = mass;
        mass += p[*token];
        before < 0.9
    };
    let kept = order.iter().copied().take_while(below).count();
    assert!(kept > 600, "the case must need many candidates");
    let sampling = Sampling { top_p: 0.9, ..Sampling::default() };
    assert_distribution(&sampling, &logits, &softmax(&logits, 1.0, &order[..kept]));
}

#[test]
fn min_p_is_relative_to_the_best() {
    // 0.3 of 0.4 is 0.12: 0.1 and 0.05 go.
    for top_p in [1.0, 0.999] {
        let sampling = Sampling { min_p: 0.3, top_p, ..Sampling::default() };
        assert_distribution(&sampling, &five(), &softmax(&five(), 1.0, &[1, 2, 4]));
    }
}

#[test]
fn masked_tokens_never_come_out() {
    let mut logits = five();
    logits[1] = f32::NEG_INFINITY;
    for sampling in [
        Sampling::default(),
        Sampling { top_k: 4, ..Sampling::default() },
        Sampling { top_p: 0.999, ..Sampling::default() },
    ] {
        let sampling = Sampling { logit_bias: vec![(1, 100.0)], ..sampling };
        assert_distribution(&sampling, &logits, &softmax(&logits, 1.0, &[0, 2, 3, 4]));
    }
}

#[test]
fn repetition_penalty_divides_positive_and_multiplies_negative_logits() {
    let sampling = Sampling { repetition_penalty: 2.0, ..greedy() };
    let mut logits = [3.0, 2.0, -1.0, -1.5, 1.0];
    // Token 0 is in the prompt, tokens 2 and 4 were generated.
    slot(sampling, &[0], &[2, 4]).adjust(&mut logits);
    assert_eq!(logits, [1.5, 2.0, -2.0, -1.5, 0.5]);
}

#[test]
fn frequency_and_presence_count_generated_tokens_only() {
    let sampling = Sampling { frequency_penalty: 0.5, presence_penalty: 0.25, ..greedy() };
    let mut logits = [3.0, 2.0, -1.0];
    slot(sampling, &[0, 0, 1], &[1, 2, 2]).adjust(&mut logits);
    assert_eq!(logits, [3.0, 2.0 - 0.5 - 0.25, -1.0 - 2.0 * 0.5 - 0.25]);
}

#[test]
fn bias_is_added_after_penalties() {
    let sampling = Sampling { repetition_penalty: 2.0, logit_bias: vec![(1, 5.0), (2, -100.0)], ..greedy() };
    let mut logits = [3.0, 4.0, 8.0];
    slot(sampling, &[1], &[]).adjust(&mut logits);
    assert_eq!(logits, [3.0, 7.0, -92.0]);
}

#[test]
fn a_sampled_token_counts_from_the_next_one_on() {
    let sampling = Sampling { presence_penalty: 2.0, ..greedy() };
    let (mut slot, mut sampler) = (slot(sampling, &[], &[]), Sampler::default());
    let tokens: Vec<_> = (0..3).map(|_| sampler.sample(&mut slot, &mut [3.0, 2.0, 0.5], None).token).collect();
    // 3, 2, 0.5; then 1, 2, 0.5; then 1, 0, 0.5.
    assert_eq!(tokens, [0, 1, 0]);
}

#[test]
fn a_draw_depends_on_seed_choice_and_output_index_alone() {
    let run = |sampling: &Sampling, generated: &[TokenId], n: usize| -> Vec<TokenId> {
        let (mut slot, mut sampler) = (slot(sampling.clone(), &[9], generated), Sampler::default());
        let logits: Vec<f32> = (0..100).map(|token| (token % 10) as f32 * 0.1).collect();
        (0..n).map(|_| sampler.sample(&mut slot, &mut logits.clone(), None).token).collect()
    };
    let sampling = Sampling { seed: 42, ..Sampling::default() };
    let all = run(&sampling, &[], 20);
    assert_eq!(run(&sampling, &all[..12], 8), all[12..], "resumed after 12 tokens");
    assert_ne!(run(&Sampling { choice: 1, ..sampling.clone() }, &[], 20), all);
    assert_ne!(run(&Sampling { seed: 43, ..sampling }, &[], 20), all);
}

#[test]
fn logprobs_are_those_of_the_unmodified_distribution() {
    let sampling = Sampling { logprobs: Some(2), logit_bias: vec![(3, 50.0)], temperature: 0.3, ..Sampling::default() };
    let sampled = draw_once(sampling, &five());
    assert_eq!(sampled.token, 3);
    assert!((sampled.logprob.expect("was asked for") - 0.05f32.ln()).abs() < 1e-6);
    assert_eq!(sampled.top.iter().map(|top| top.token).collect::<Vec<_>>(), [1, 4]);
    assert!(
        (sampled.top[0].logprob - 0.4f32.ln()).abs() < 1e-6 && (sampled.top[1].logprob - 0.25f32.ln()).abs() < 1e-6
    );
    assert_eq!(draw_once(Sampling::default(), &five()).logprob, None);
}

#[test]
fn top_logprobs_list_equals_by_id() {
    assert_eq!(top_logits(&[1.0, 2.0, 2.0, 1.0, 2.0], 4), [(1, 2.0), (2, 2.0), (4, 2.0), (0, 1.0)]);
    assert_eq!(top_logits(&[1.0], 3), [(0, 1.0)]);
    assert_eq!(top_logits(&[1.0], 0), []);
}

#[test]
fn a_mask_comes_before_everything_else_and_leaves_logprobs_alone() {
    let logits = [5.0, 4.0, 3.0, 2.0];
    let mask = TokenMask::from_words([0b1100].into());
    for sampling in [
        greedy(),
        Sampling { top_k: 1, ..Sampling::default() },
        Sampling { top_p: 0.1, ..Sampling::default() },
        Sampling { min_p: 0.9, ..Sampling::default() },
        Sampling { logit_bias: vec![(0, 100.0), (1, 100.0)], temperature: 0.0, ..Sampling::default() },
        Sampling { repetition_penalty: 0.5, temperature: 0.0, ..Sampling::default() },
    ] {
        let sampling = Sampling { logprobs: Some(1), ..sampling };
        let mut slot = slot(sampling.clone(), &[0, 1], &[]);
        let masked = Sampler::default().sample(&mut slot, &mut logits.to_vec(), Some(&mask));
        assert_eq!(masked.token, 2, "{sampling:?}");
        assert_eq!(masked.top[0].token, 0, "the model's own favourite");
        let log_sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>().ln();
        assert!((f64::from(masked.logprob.unwrap()) - (3.0 - log_sum)).abs() < 1e-5);
    }
}

/// The inverse of a subnormal temperature is infinite.
#[test]
fn the_coldest_draws_are_greedy() {
    let mut logits: Vec<f32> = (0..700).map(|token| (token * 37 % 100) as f32 * 0.1).collect();
    logits[123] = f32::NEG_INFINITY;
    logits[456] = 10.5;
    let cold = |temperature| Sampling { temperature, seed: 3, ..Sampling::default() };
    for temperature in [1e-40, f32::from_bits(1), f32::MIN_POSITIVE] {
        for sampling in [
            cold(temperature),
            Sampling { top_p: 0.9, ..cold(temperature) },
            Sampling { top_k: 5, ..cold(temperature) },
            Sampling { top_k: 50, top_p: 0.5, min_p: 0.1, ..cold(temperature) },
            Sampling { min_p: 0.1, ..cold(temperature) },
        ] {
            assert_eq!(draw_once(sampling.clone(), &logits).token, 456, "{sampling:?}");
            let penalised = Sampling { presence_penalty: 1.0, frequency_penalty: 0.5, ..sampling };
            let greedy = Sampling { temperature: 0.0, ..penalised.clone() };
            let draw = |sampling| {
                let mut slot = slot(sampling, &[1], &[456, 456]);
                Sampler::default().sample(&mut slot, &mut logits.clone(), None).token
            };
            // The best is now one of seven equals, of which the coldest draw may take any.
            let (greedy, token) = (draw(greedy), draw(penalised.clone()));
            assert_eq!(greedy, 27, "{penalised:?}");
            assert_eq!(logits[token as usize], logits[27], "{penalised:?}");
        }
    }
}

#[test]
fn neither_nan_nor_infinity_is_a_number() {
    assert!(are_numbers(&[0.0, -1.0, f32::NEG_INFINITY, f32::MAX]));
    for broken in [f32::NAN, -f32::NAN, f32::INFINITY] {
        assert!(!are_numbers(&[0.0, broken, 1.0]), "{broken}");
    }
}
