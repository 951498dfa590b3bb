//! Decode attention: windows, sinks, splits, page borders; memory outside the context holds NaNs.

use half::bf16;
use kernels::{DecodeAttention, KvCache, KvFormat, PageTable};
use model::E4M3;
use model::reference::{self, AttentionShape};

use crate::gpu::{BF16_ROUNDING, Gpu, Random, compare, widen};

const DIM: usize = 64;

struct Heads {
    query: usize,
    kv: usize,
}

const OF_20B: Heads = Heads { query: 64, kv: 8 };

/// Sequences of these context lengths, their keys in shuffled pages; `max_context` decides the number of splits. In both formats, with rows of
/// the page table in the order of queries, and in another that is named.
fn check(case: &str, contexts: &[i32], heads: Heads, page_tokens: usize, window: Option<usize>, max_context: usize) {
    for format in [KvFormat::Bf16, KvFormat::E4M3] {
        for named in [false, true] {
            check_format(case, (format, named), contexts, &heads, page_tokens, window, max_context);
        }
    }
}

/// A random number of the format, widened, and its bytes.
fn element(format: KvFormat, x: bf16) -> (f32, Vec<u8>) {
    match format {
        KvFormat::Bf16 => (x.to_f32(), x.to_le_bytes().to_vec()),
        KvFormat::E4M3 => {
            let x = E4M3::from_f32(x.to_f32());
            (x.to_f32(), vec![x.0])
        }
    }
}

fn check_format(
    case: &str,
    (format, named): (KvFormat, bool),
    contexts: &[i32],
    heads: &Heads,
    page_tokens: usize,
    window: Option<usize>,
    max_context: usize,
) {
    let Some(mut gpu) = Gpu::open() else { return };
    let mut random = Random::new();
    let (layers, layer, batch) = (2, 1, contexts.len());
    let width = contexts.iter().map(|n| (*n as usize).div_ceil(page_tokens)).max().unwrap().max(1);
    let mut order: Vec<i32> = (0..(batch * width) as i32).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i + 1));
    }
    // Keys of one sequence: [position][kv head][dim]. Large sinks, so that a forgotten one changes everything.
    let kv_len = |context: i32| context as usize * heads.kv * DIM;
    let mut planes = |_| -> Vec<Vec<bf16>> { contexts.iter().map(|n| random.bf16(kv_len(*n), 1.0)).collect() };
    let [keys, values] = std::array::from_fn(&mut planes);
    let q = random.bf16(batch * heads.query * DIM, 2.0);
    let sinks: Vec<bf16> = (0..heads.query).map(|_| bf16::from_f32(3.0 + random.normal(3.0))).collect();

    let mut cache = KvCache::new(&gpu.stream, format, batch * width, layers, heads.kv, page_tokens).unwrap();
    let mut pool = vec![0xff; cache.pool.len()]; // NaNs
    let row_bytes = DIM * format.bytes();
    for (sequence, context) in contexts.iter().enumerate() {
        let first_visible = window.map_or(0, |window| (*context as usize).saturating_sub(window));
        for position in first_visible..*context as usize {
            let page = order[sequence * width + position / page_tokens] as usize;
            for head in 0..heads.kv {
                for (plane, source) in [&keys, &values].into_iter().enumerate() {
                    let row = (((page * layers + layer) * heads.kv + head) * 2 + plane) * page_tokens
                        + position % page_tokens;
                    let source = &source[sequence][(position * heads.kv + head) * DIM..][..DIM];
                    let bytes: Vec<u8> = source.iter().flat_map(|x| element(format, *x).1).collect();
                    pool[row * row_bytes..][..row_bytes].copy_from_slice(&bytes);
                }
            }
        }
    }
    gpu.stream.copy_from_host(cache.pool.view_mut(), &pool).unwrap();
    let (device_q, device_sinks) = (gpu.upload(&q), gpu.upload(&sinks));
    let device_contexts = gpu.upload(contexts);
    // Named, a query's row of the table is the one that lies as far from the end, behind one that is nobody's.
    let row_of = |sequence: usize| if named { batch - sequence } else { sequence };
    let mut table = vec![i32::MIN; (batch + usize::from(named)) * width];
    for (sequence, pages) in order.chunks(width).enumerate() {
        table[row_of(sequence) * width..][..width].copy_from_slice(pages);
    }
    let sequences = gpu.upload(&(0..batch).map(|sequence| row_of(sequence) as i32).collect::<Vec<_>>());
    let table = gpu.upload(&table);
    let mut out = gpu.poisoned::<bf16>(q.len());
    DecodeAttention {
        q: device_q.view(),
        sinks: device_sinks.view(),
        cache: &cache,
        layer,
        contexts: device_contexts.view(),
        sequences: named.then(|| sequences.view()),
        table: PageTable { pages: table.view(), width, first_page: None },
        window,
        max_context,
        out: out.view_mut(),
        workspace: &mut gpu.workspace,
    }
    .enqueue(&gpu.kernels, &gpu.stream)
    .unwrap();
    let got = gpu.download(&out);

    let shape = AttentionShape { num_heads: heads.query, num_kv_heads: heads.kv, head_dim: DIM, window };
    let row = heads.query * DIM;
    let widened = |source: &[bf16]| source.iter().map(|x| element(format, *x).0).collect::<Vec<f32>>();
    // Probabilities are rounded before they weigh values of size 1 to 3: to bf16, at random, 2^-9 x |v| each, averaging out; or to
    // f16, where even the worst case is 2^-12 x |v|. The output is rounded to bf16. f32 scores and the fast exponential add 1e-5.
    let (relative, absolute) = match format {
        KvFormat::Bf16 => (0.01, 0.006),
        KvFormat::E4M3 => (BF16_ROUNDING, 0.0015),
    };
    for (sequence, context) in contexts.iter().enumerate() {
        let got = &got[sequence * row..][..row];
        let want = match context {
            0 => vec![0.0; row],
            _ => reference::attention(
                &widen(&q[sequence * row..][..row]),
                &widened(&keys[sequence]),
                &widened(&values[sequence]),
                &widen(&sinks),
                shape,
            ),
        };
        let case = format!("{case}, {format:?}, named {named}: sequence {sequence}");
        compare(&case, got, &want, DIM, |want, _| relative * want.abs() + absolute);
    }
}

#[test]
fn one_key() {
    check("one key", &[1], OF_20B, 64, None, 1);
}

#[test]
fn tile_and_page_borders() {
    check("borders", &[31, 32, 33, 63, 64, 65, 127, 128, 129, 200], OF_20B, 64, None, 256);
    check("borders", &[1, 32, 33, 511], OF_20B, 32, None, 512);
    check("borders", &[129, 255], OF_20B, 128, None, 512);
}

#[test]
fn window_borders() {
    check("window", &[1, 126, 127, 128, 129, 130, 160, 161, 300, 1000], OF_20B, 64, Some(128), 1000);
}

#[test]
fn split_contexts() {
    check("split", &[5000], OF_20B, 64, None, 5000);
    check("split", &[5000, 1, 0, 700], OF_20B, 64, None, 5000);
}

#[test]
fn a_context_longer_than_was_planned_for() {
    check("longer", &[3000], OF_20B, 64, None, 128);
}

#[test]
fn padding_rows_are_zero() {
    check("padding", &[0, 40, 0], OF_20B, 64, None, 64);
}

#[test]
fn fewer_query_heads_a_kv_head() {
    check("nano", &[7, 300], Heads { query: 8, kv: 4 }, 64, None, 300);
    check("one kv head", &[300], Heads { query: 8, kv: 1 }, 64, Some(128), 300);
}
