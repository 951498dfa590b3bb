use super::*;

fn assert_near(ours: &[f32], expected: &[f64]) {
    assert_eq!(ours.len(), expected.len());
    for (i, (&a, &b)) in ours.iter().zip(expected).enumerate() {
        assert!((f64::from(a) - b).abs() < 1e-6 * b.abs().max(1.0), "[{i}] is {a}, expected {b}");
    }
}

const ONE_HEAD: AttentionShape = AttentionShape { num_heads: 1, num_kv_heads: 1, head_dim: 1, window: None };

#[test]
fn linear_by_hand() {
    assert_eq!(linear(&[1.0, 2.0], &[3.0, 4.0, 5.0, 6.0, 7.0, 8.0], Some(&[0.5, 0.0, -1.0])), [11.5, 17.0, 22.0]);
}

#[test]
fn rmsnorm_multiplies_the_weight_last() {
    assert_near(&rmsnorm(&[3.0, 4.0], &[2.0, -1.0], 0.0), &[6.0 / 12.5f64.sqrt(), -4.0 / 12.5f64.sqrt()]);
    assert_near(&rmsnorm(&[0.0, 0.0], &[1.0, 1.0], 1e-5), &[0.0, 0.0]);
}

#[test]
fn rotation_pairs_the_halves() {
    // A quarter turn of channel pair 0 = (channel 0, channel 2); pair 1 stays.
    let mut head = [1.0, 2.0, 3.0, 4.0];
    rotate(&mut head, &[0.0, 1.0], &[1.0, 0.0]);
    assert_eq!(head, [-3.0, 2.0, 1.0, 4.0]);
}

#[test]
fn a_sink_takes_part_of_the_mass() {
    // Scores 0 and 0, sink 0: a third of the mass is dropped.
    assert_near(&attention(&[0.0], &[1.0, 1.0], &[3.0, 6.0], &[0.0], ONE_HEAD), &[3.0]);
    // A sink far above the scores drops nearly all, one far below nothing.
    assert_near(&attention(&[0.0], &[1.0, 1.0], &[3.0, 6.0], &[1000.0], ONE_HEAD), &[0.0]);
    assert_near(&attention(&[0.0], &[1.0, 1.0], &[3.0, 6.0], &[-1000.0], ONE_HEAD), &[4.5]);
}

#[test]
fn scores_are_scaled_and_the_sink_is_not() {
    let shape = AttentionShape { head_dim: 4, ..ONE_HEAD };
    let out = attention(&[2.0, 0.0, 0.0, 0.0], &[3.0, 0.0, 0.0, 0.0], &[1.0, 0.0, 0.0, 0.0], &[3.0], shape);
    // q . k = 6, divided by sqrt(4): 3, the same as the sink.
    assert_near(&out, &[0.5, 0.0, 0.0, 0.0]);
}

#[test]
fn window_boundary() {
    // Only the key at distance `d` has a value: seen at 126 and 127, not at 128.
    for (distance, seen) in [(0, true), (126, true), (127, true), (128, false), (129, false)] {
        let mut values = vec![0.0; 200];
        values[199 - distance] = 1.0;
        let shape = AttentionShape { window: Some(128), ..ONE_HEAD };
        let out = attention(&[0.0], &vec![0.0; 200], &values, &[f32::NEG_INFINITY], shape);
        assert_near(&out, &[if seen { 1.0 / 128.0 } else { 0.0 }]);
    }
}

#[test]
fn neighbouring_query_heads_share_a_kv_head() {
    let shape = AttentionShape { num_heads: 4, num_kv_heads: 2, head_dim: 1, window: None };
    assert_near(&attention(&[0.0; 4], &[0.0; 2], &[5.0, 7.0], &[f32::NEG_INFINITY; 4], shape), &[5.0, 5.0, 7.0, 7.0]);
}

#[test]
fn routing_takes_the_lowest_index_among_equals() {
    let routed = route(&[1.0, 3.0, 1.0, 3.0, 1.0, 0.0], 4);
    assert_eq!(routed.iter().map(|routed| routed.expert).collect::<Vec<_>>(), [1, 3, 0, 2]);
    let e = (-2f64).exp();
    let weights: Vec<f32> = routed.iter().map(|routed| routed.weight).collect();
    assert_near(&weights, &[1.0, 1.0, e, e].map(|part| part / (2.0 + 2.0 * e)));
}

#[test]
fn swiglu_clamps() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    // Gate above the limit, gate far below it (no lower clamp), up beyond both limits.
    assert_near(
        &swiglu(&[100.0, 2.0, -20.0, 0.0, 1.0, 9.0, 1.0, -9.0], 7.0),
        &[
            7.0 * sigmoid(f64::from(SWIGLU_ALPHA) * 7.0) * 3.0,
            -20.0 * sigmoid(f64::from(SWIGLU_ALPHA) * -20.0),
            sigmoid(f64::from(SWIGLU_ALPHA)) * 8.0,
            sigmoid(f64::from(SWIGLU_ALPHA)) * -6.0,
        ],
    );
}

#[test]
fn expert_bias_is_weighted() {
    // Zero matrices: what remains is sum_k w_k b_k.
    let expert = |bias: f32| Expert {
        gate_up: vec![0.0; 4],
        gate_up_bias: vec![0.0; 2],
        down: vec![0.0; 2],
        down_bias: vec![bias, 2.0 * bias],
    };
    let routed = [Routed { expert: 1, weight: 0.75 }, Routed { expert: 0, weight: 0.25 }];
    assert_near(&moe(&[1.0, 1.0], &routed, &[expert(4.0), expert(8.0)], 7.0), &[7.0, 14.0]);
}
