//! Sampling against a sort in f64: the token drawn must be one that is kept, and the uniform number must fall into its share.

use kernels::{MAX_TOP_LOGPROBS, Sample, SampleRow, SampleStatus};

use crate::gpu::{Gpu, Random};

const VOCAB: usize = 201_088;

/// Operands beside the logits.
struct Inputs {
    vocab: usize,
    rows: Vec<SampleRow>,
    counts: Vec<u16>,
    masks: Vec<u32>,
    assigned: Option<Vec<u32>>,
    biases: Vec<(i32, f32)>,
}

impl Inputs {
    fn new(vocab: usize, rows: Vec<SampleRow>) -> Self {
        Self { vocab, rows, counts: vec![0], masks: vec![0], assigned: None, biases: vec![(0, 0.0)] }
    }
}

struct Outcome {
    tokens: Vec<i32>,
    status: Vec<u32>,
    logprobs: Vec<f32>,
    top_tokens: Vec<i32>,
    top_logprobs: Vec<f32>,
    counts: Vec<u16>,
}

fn sample(gpu: &Gpu, logits: &[f32], inputs: &Inputs) -> Outcome {
    let rows = inputs.rows.len();
    let (logits, device_rows) = (gpu.upload(logits), gpu.upload(&inputs.rows));
    let (mut tokens, mut status) = (gpu.poisoned::<i32>(rows), gpu.poisoned::<u32>(rows));
    let (mut logprobs, mut top_logprobs) = (gpu.poisoned::<f32>(rows), gpu.poisoned::<f32>(rows * MAX_TOP_LOGPROBS));
    let mut top_tokens = gpu.poisoned::<i32>(rows * MAX_TOP_LOGPROBS);
    let mut counts = gpu.upload(&inputs.counts);
    let (masks, assigned) = (gpu.upload(&inputs.masks), inputs.assigned.as_ref().map(|mask| gpu.upload(mask)));
    let (bias_tokens, bias_values): (Vec<i32>, Vec<f32>) = inputs.biases.iter().copied().unzip();
    let (bias_tokens, bias_values) = (gpu.upload(&bias_tokens), gpu.upload(&bias_values));
    Sample {
        logits: logits.view(),
        rows: device_rows.view(),
        vocab: inputs.vocab,
        tokens: tokens.view_mut(),
        status: status.view_mut(),
        logprobs: logprobs.view_mut(),
        top_tokens: top_tokens.view_mut(),
        top_logprobs: top_logprobs.view_mut(),
        counts: counts.view_mut(),
        masks: masks.view(),
        assigned: assigned.as_ref().map(|mask| mask.view()),
        bias_tokens: bias_tokens.view(),
        bias_values: bias_values.view(),
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    let stream = &gpu.stream;
    Outcome {
        tokens: stream.download(tokens.view()).unwrap(),
        status: stream.download(status.view()).unwrap(),
        logprobs: stream.download(logprobs.view()).unwrap(),
        top_tokens: stream.download(top_tokens.view()).unwrap(),
        top_logprobs: stream.download(top_logprobs.view()).unwrap(),
        counts: stream.download(counts.view()).unwrap(),
    }
}

fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let first = u64::from(0xd251_1f53_u32) * u64::from(counter[0]);
        let second = u64::from(0xcd9e_8d57_u32) * u64::from(counter[2]);
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

fn uniform(row: &SampleRow) -> f64 {
    let [high, low, ..] = philox4x32([row.choice, row.output_idx, 0, 0], [row.seed as u32, (row.seed >> 32) as u32]);
    ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64 / (1_u64 << 53) as f64
}

/// The adjusted logits of a row.
fn adjusted(logits: &[f32], inputs: &Inputs, row: &SampleRow) -> Vec<f32> {
    let vocab = inputs.vocab;
    let mut logits = logits.to_vec();
    if row.counts_row >= 0 {
        for (logit, count) in logits.iter_mut().zip(&inputs.counts[row.counts_row as usize * vocab..][..vocab]) {
            if *count > 0 {
                *logit = if *logit > 0.0 { *logit / row.repetition_penalty } else { *logit * row.repetition_penalty };
            }
            if *count > 1 {
                *logit -= row.frequency_penalty * f32::from(*count - 1) + row.presence_penalty;
            }
        }
    }
    for (token, value) in &inputs.biases[row.bias_first as usize..][..row.bias_count as usize] {
        logits[*token as usize] += value;
    }
    let allowed = |mask: &[u32], id: usize| mask[id / 32] >> (id % 32) & 1 == 1;
    for (id, logit) in logits.iter_mut().enumerate() {
        let masked = row.mask_row >= 0 && !allowed(&inputs.masks[row.mask_row as usize * vocab.div_ceil(32)..], id);
        if masked || inputs.assigned.as_ref().is_some_and(|mask| !allowed(mask, id)) {
            *logit = f32::NEG_INFINITY;
        }
    }
    logits
}

/// Checks one drawn token. Sums differ by rounding, so borders have a tolerance of 1e-5 of the whole: 200,000 weights in f32 with
/// exponentials of two ulp are off by at most 5e-7, and a share of a token at a border is often no larger than that.
fn check_draw(case: &str, logits: &[f32], inputs: &Inputs, row: &SampleRow, token: i32) {
    const TOLERANCE: f64 = 1e-5;
    let logits = adjusted(logits, inputs, row);
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if row.temperature == 0.0 {
        assert_eq!(token as usize, logits.iter().position(|logit| *logit == top).unwrap(), "{case}: greedy");
        return;
    }
    let weight = |id: usize| (f64::from(logits[id] - top) / f64::from(row.temperature)).exp();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let by_rank = row.top_p < 1.0 || row.top_k > 0;
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if row.top_k > 0 {
        order.truncate(row.top_k as usize);
    }
    let total: f64 = order.iter().map(|id| weight(*id)).sum();
    let mut kept_mass = 0.0;
    let mut kept = Vec::new();
    for id in order {
        // One more than exact arithmetic would keep may stay when the border falls between two.
        if kept_mass >= f64::from(row.top_p) * total * (1.0 + TOLERANCE)
            || weight(id) < f64::from(row.min_p) * (1.0 - TOLERANCE)
        {
            break;
        }
        kept_mass += weight(id);
        kept.push(id);
    }
    if !by_rank {
        kept.sort_unstable();
    }
    let place = kept.iter().position(|id| *id == token as usize);
    let place = place.unwrap_or_else(|| panic!("{case}: token {token} is not among the {} kept", kept.len()));
    let before: f64 = kept[..place].iter().map(|id| weight(*id)).sum();
    // The mass drawn from may lack the token at the border.
    let least_mass = kept_mass - kept.last().map_or(0.0, |id| weight(*id)).min(if by_rank { kept_mass } else { 0.0 });
    let u = uniform(row);
    let slack = TOLERANCE * total;
    assert!(
        u * kept_mass + slack >= before && u * least_mass - slack <= before + weight(token as usize),
        "{case}: u = {u} of {kept_mass}, but token {token} covers {before} + {}",
        weight(token as usize)
    );
}

fn check(case: &str, vocab: usize, scale: f32, row: SampleRow) {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let num_rows = 24;
    let rows: Vec<SampleRow> = (0..num_rows).map(|i| SampleRow { seed: random.next(), output_idx: i, ..row }).collect();
    let logits: Vec<f32> = (0..vocab * num_rows as usize).map(|_| random.normal(scale)).collect();
    let inputs = Inputs::new(vocab, rows);
    let outcome = sample(&gpu, &logits, &inputs);
    assert_eq!(outcome.status, vec![SampleStatus::Drawn as u32; num_rows as usize], "{case}");
    for (i, row) in inputs.rows.iter().enumerate() {
        check_draw(case, &logits[i * vocab..][..vocab], &inputs, row, outcome.tokens[i]);
    }
    // A row alone gives the same token as among others.
    let alone = Inputs::new(vocab, vec![inputs.rows[5]]);
    assert_eq!(sample(&gpu, &logits[5 * vocab..][..vocab], &alone).tokens[0], outcome.tokens[5], "{case}: alone");
}

#[test]
fn greedy() {
    check("greedy", VOCAB, 3.0, SampleRow::default());
}

#[test]
fn temperature() {
    check("temperature", VOCAB, 3.0, SampleRow { temperature: 1.0, ..SampleRow::default() });
    check("cold", VOCAB, 3.0, SampleRow { temperature: 0.3, ..SampleRow::default() });
    check("small vocabulary", 2048, 3.0, SampleRow { temperature: 1.5, ..SampleRow::default() });
    check("tiny vocabulary", 5, 1.0, SampleRow { temperature: 1.0, ..SampleRow::default() });
}

/// The inverse of a subnormal temperature is infinite, and the greatest logit's distance 0 times it.
#[test]
fn the_coldest_draws_are_greedy() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let warm = SampleRow { bias_count: 1, ..SampleRow::default() };
    let penalised = SampleRow {
        presence_penalty: 0.7,
        frequency_penalty: 0.3,
        repetition_penalty: 1.3,
        counts_row: 0,
        mask_row: 0,
        ..warm
    };
    for temperature in [1e-40, f32::from_bits(1), f32::MIN_POSITIVE] {
        for row in [warm, penalised] {
            let cold = SampleRow { temperature, ..row };
            let all = SampleRow { top_k: 5000, top_p: 0.9, min_p: 0.1, ..cold };
            let rows = [
                cold,
                SampleRow { top_p: 0.9, ..cold },
                SampleRow { top_k: 50, ..cold },
                SampleRow { top_k: 5000, ..cold },
                SampleRow { min_p: 0.1, ..cold },
                all,
            ];
            for row in rows {
                let mut inputs = Inputs::new(VOCAB, vec![SampleRow { temperature: 0.0, ..row }, row]);
                inputs.counts = (0..VOCAB).map(|_| random.below(4) as u16).collect();
                inputs.masks = (0..VOCAB.div_ceil(32)).map(|_| random.next() as u32).collect();
                // Lifted above all others: of equal logits greedy takes the first, and a draw any.
                inputs.biases = vec![(random.below(VOCAB) as i32, 40.0)];
                inputs.masks[inputs.biases[0].0 as usize / 32] = u32::MAX;
                let logits: Vec<f32> = (0..VOCAB).map(|_| random.normal(3.0)).collect();
                // A row that counts changes the counts, so each has its own.
                let draw = |i: usize| {
                    let mut alone = Inputs::new(VOCAB, vec![inputs.rows[i]]);
                    (alone.counts, alone.masks) = (inputs.counts.clone(), inputs.masks.clone());
                    alone.biases = inputs.biases.clone();
                    sample(&gpu, &logits, &alone)
                };
                let (greedy, drawn) = (draw(0), draw(1));
                assert_eq!(greedy.tokens, [inputs.biases[0].0], "{row:?}");
                assert_eq!((drawn.status, drawn.tokens), (greedy.status, greedy.tokens), "{row:?}");
                assert_eq!(drawn.counts, greedy.counts, "{row:?}");
            }
        }
    }
}

#[test]
fn top_k() {
    for k in [1, 2, 50, 5000] {
        check("top-k", VOCAB, 3.0, SampleRow { temperature: 1.0, top_k: k, ..SampleRow::default() });
    }
}

#[test]
fn top_p_and_min_p() {
    for top_p in [0.01, 0.5, 0.95] {
        check("top-p", VOCAB, 5.0, SampleRow { temperature: 1.0, top_p, ..SampleRow::default() });
    }
    check("min-p", VOCAB, 5.0, SampleRow { temperature: 1.0, min_p: 0.1, ..SampleRow::default() });
    let all = SampleRow { temperature: 0.8, top_k: 100, top_p: 0.9, min_p: 0.02, ..SampleRow::default() };
    check("all", VOCAB, 5.0, all);
}

#[test]
fn equal_logits_are_kept_by_id() {
    let Some(gpu) = Gpu::open() else { return };
    let row = SampleRow { temperature: 1.0, top_k: 3, ..SampleRow::default() };
    let rows = (0..64).map(|i| SampleRow { seed: i, ..row }).collect();
    let inputs = Inputs::new(VOCAB, rows);
    let mut tokens = sample(&gpu, &vec![1.0; 64 * VOCAB], &inputs).tokens;
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens, [0, 1, 2]);
}

#[test]
fn penalties_bias_and_masks() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let row = SampleRow {
        temperature: 1.0,
        presence_penalty: 0.7,
        frequency_penalty: 0.3,
        repetition_penalty: 1.3,
        counts_row: 0,
        mask_row: 1,
        bias_first: 1,
        bias_count: 2,
        ..SampleRow::default()
    };
    let mut inputs = Inputs::new(VOCAB, (0..4).map(|i| SampleRow { counts_row: i, seed: i as u64, ..row }).collect());
    inputs.counts = (0..4 * VOCAB).map(|_| random.below(4) as u16).collect();
    inputs.masks = (0..2 * VOCAB.div_ceil(32)).map(|_| random.next() as u32).collect();
    inputs.assigned = Some((0..VOCAB.div_ceil(32)).map(|_| random.next() as u32).collect());
    inputs.biases = vec![(9, 90.0), (77, 4.0), (199_999, -3.0)];
    let logits: Vec<f32> = (0..4 * VOCAB).map(|_| random.normal(4.0)).collect();
    let outcome = sample(&gpu, &logits, &inputs);
    for (i, row) in inputs.rows.iter().enumerate() {
        let token = outcome.tokens[i];
        check_draw("adjusted", &logits[i * VOCAB..][..VOCAB], &inputs, row, token);
        let at = i * VOCAB + token as usize;
        assert_eq!(outcome.counts[at], inputs.counts[at].max(1) + 1, "the token drawn is counted");
        inputs.counts[at] = outcome.counts[at];
        assert_eq!(outcome.counts[i * VOCAB..][..VOCAB], inputs.counts[i * VOCAB..][..VOCAB], "and no other");
    }
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let Some(gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let row = SampleRow { temperature: 0.5, bias_first: 0, bias_count: 1, logprobs: 20, ..SampleRow::default() };
    let mut inputs = Inputs::new(VOCAB, vec![row, SampleRow { logprobs: 0, ..row }]);
    inputs.biases = vec![(123, 50.0)];
    let logits: Vec<f32> = (0..2 * VOCAB).map(|_| random.normal(3.0)).collect();
    let outcome = sample(&gpu, &logits, &inputs);
    assert_eq!(outcome.tokens, [123, 123], "the bias decides");
    for (i, row) in logits.chunks(VOCAB).enumerate() {
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        let logprob = |id: usize| f64::from(row[id]) - sum.ln();
        assert!(
            (f64::from(outcome.logprobs[i]) - logprob(123)).abs() < 1e-5,
            "{} {}",
            outcome.logprobs[i],
            logprob(123)
        );
        if i > 0 {
            continue;
        }
        let mut order: Vec<usize> = (0..VOCAB).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        for (j, want) in order.into_iter().take(20).enumerate() {
            assert_eq!(outcome.top_tokens[j] as usize, want, "alternative {j}");
            assert!((f64::from(outcome.top_logprobs[j]) - logprob(want)).abs() < 1e-5);
        }
    }
}

#[test]
fn broken_rows_say_so_and_spare_the_others() {
    let Some(gpu) = Gpu::open() else { return };
    let row = SampleRow { temperature: 1.0, ..SampleRow::default() };
    let mut inputs = Inputs::new(VOCAB, vec![row; 7]);
    inputs.rows[3].mask_row = 0;
    inputs.masks = vec![0; VOCAB.div_ceil(32)];
    let mut logits = vec![0.0; 7 * VOCAB];
    logits[VOCAB - 1] = f32::NAN;
    logits[VOCAB..2 * VOCAB].fill(f32::NEG_INFINITY);
    logits[4 * VOCAB + 77] = f32::INFINITY;
    (inputs.rows[5].top_p, inputs.rows[5].logprobs) = (0.9, 5);
    logits[5 * VOCAB + 77] = f32::INFINITY;
    // Finite as it comes in: the penalty makes it infinite.
    (inputs.rows[6].counts_row, inputs.rows[6].repetition_penalty) = (0, 1e-3);
    inputs.counts = vec![1; VOCAB];
    logits[6 * VOCAB + 77] = f32::MAX;
    let outcome = sample(&gpu, &logits, &inputs);
    use SampleStatus::{Drawn, NotANumber, NothingAllowed};
    let want = [NotANumber, NothingAllowed, Drawn, NothingAllowed, NotANumber, NotANumber, NotANumber];
    assert_eq!(outcome.status, want.map(|status| status as u32));
    assert!(outcome.tokens.iter().all(|token| (0..VOCAB as i32).contains(token)));
}
