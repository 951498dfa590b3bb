use serde_json::{Value, json};

use super::*;

const NANO: &str = include_str!("../../gpt-oss-nano/config.json");

fn parse(config: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(&config.to_string(), Path::new("dir/config.json"))
}

fn hugging_face() -> Value {
    serde_json::from_str(NANO).expect("nano's config is json")
}

/// `original/config.json` of the released 20b, field by field the dataclass `ModelConfig` of the reference.
fn original() -> Value {
    json!({
        "num_hidden_layers": 24, "num_experts": 32, "experts_per_token": 4, "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "swiglu_limit": 7.0, "head_dim": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "initial_context_length": 4096, "rope_theta": 150000,
        "rope_scaling_factor": 32.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32
    })
}

#[test]
fn nano() {
    let config = parse(&hugging_face()).expect("nano's config is supported");
    assert_eq!((config.num_layers, config.hidden_size, config.num_experts), (4, 320, 8));
    assert_eq!((config.num_heads, config.num_kv_heads, config.q_width(), config.kv_width()), (8, 4, 512, 256));
    assert_eq!((config.group_size(), config.softmax_scale()), (2, 0.125));
    assert_eq!(config.layers_of(LayerKind::Sliding), [0, 2]);
    assert_eq!((config.page_group(0), config.page_group(1)), (PageGroup::Window, PageGroup::Full));
    assert_eq!(config.rope, ModelConfig::gpt_oss_20b().rope);
    let kv = config.kv_layout(16, KvDtype::F32, 2);
    assert_eq!((kv.full_layers, kv.window_layers), (vec![1, 3], vec![0, 2]));
    assert_eq!((kv.kv_heads, kv.head_dim, kv.page_tokens, kv.window, kv.tp), (4, 64, 16, 128, 2));
}

#[test]
fn both_dialects_describe_the_released_models() {
    assert_eq!(parse(&original()), Ok(ModelConfig::gpt_oss_20b()));
    let mut large = original();
    (large["num_hidden_layers"], large["num_experts"]) = (json!(36), json!(128));
    assert_eq!(parse(&large), Ok(ModelConfig::gpt_oss_120b()));

    let mut hugging_face = hugging_face();
    for (field, value) in [
        ("num_hidden_layers", json!(24)),
        ("hidden_size", json!(2880)),
        ("intermediate_size", json!(2880)),
        ("num_local_experts", json!(32)),
        ("num_attention_heads", json!(64)),
        ("num_key_value_heads", json!(8)),
        ("vocab_size", json!(201_088)),
        ("layer_types", Value::Null),
    ] {
        hugging_face[field] = value;
    }
    assert_eq!(parse(&hugging_face), Ok(ModelConfig::gpt_oss_20b()));
}

#[test]
fn rope_dictionary_under_either_key() {
    let expected = parse(&hugging_face()).expect("nano's config is supported");
    let mut newer = hugging_face();
    let fields = newer.as_object_mut().expect("an object");
    let mut rope = fields.remove("rope_scaling").expect("nano has rope_scaling");
    rope["rope_theta"] = fields.remove("rope_theta").expect("nano has rope_theta");
    fields.insert("rope_parameters".into(), rope.clone());
    assert_eq!(parse(&newer).as_ref(), Ok(&expected));
    newer["rope_scaling"] = rope;
    assert_eq!(parse(&newer).as_ref(), Ok(&expected), "both keys, equal");
    newer["rope_scaling"]["factor"] = json!(16.0);
    assert!(parse(&newer).is_err(), "both keys, different");
}

#[test]
fn layer_types_override_the_pattern() {
    let mut config = hugging_face();
    config["layer_types"][0] = json!("full_attention");
    assert_eq!(parse(&config).expect("any order is supported").layers_of(LayerKind::Full), [0, 1, 3]);
}

#[test]
fn refusals_name_file_and_field() {
    let cases: &[(&str, Value, &str)] = &[
        ("/model_type", json!("llama"), r#"model_type is "llama", supported is "gpt_oss""#),
        ("/model_type", Value::Null, "model_type is missing"),
        ("/hidden_size", json!(100), "hidden_size is 100, supported is a multiple of 32"),
        ("/hidden_size", json!("320"), r#"hidden_size is "320", expected a whole number"#),
        ("/hidden_size", json!(0), "hidden_size is 0, supported is 1 to 16777216"),
        ("/hidden_size", json!(-4), "hidden_size is -4, expected a whole number"),
        ("/vocab_size", json!(u64::MAX), "vocab_size is 18446744073709551615, supported is 1 to 16777216"),
        (
            "/num_hidden_layers",
            json!(2000),
            "layer_types is a list of 4, supported is one entry for each of 2000 layers",
        ),
        ("/num_key_value_heads", json!(3), "num_key_value_heads is 3, supported is a divisor of num_attention_heads 8"),
        ("/experts_per_token", json!(2), "experts_per_token is 2, supported is the same as num_experts_per_tok"),
        ("/num_local_experts", json!(3), "experts_per_token is 4, supported is at most 3"),
        ("/layer_types/1", json!("chunked"), r#"layer_types[1] is "chunked", supported is"#),
        ("/tie_word_embeddings", json!(true), "tie_word_embeddings is true, supported is false"),
        ("/attention_bias", json!(false), "attention_bias is false, supported is true"),
        ("/hidden_act", json!("gelu"), r#"hidden_act is "gelu", supported is "silu""#),
        ("/quantization_config/quant_method", json!("fp8"), r#"quantization_config.quant_method is "fp8""#),
        ("/rope_scaling", Value::Null, "rope_scaling (or rope_parameters) is missing"),
        ("/rope_scaling/rope_type", json!("linear"), r#"rope_scaling.rope_type is "linear", supported is "yarn""#),
        ("/rope_scaling/truncate", json!(true), "rope_scaling.truncate is true, supported is false"),
        ("/rope_scaling/truncate", Value::Null, "rope_scaling.truncate is missing"),
        ("/rope_scaling/factor", json!(0.5), "rope scaling factor is 0.5, supported is above 1"),
        ("/rope_scaling/beta_fast", json!(1e9), "rope ramp is from channel"),
        ("/rope_theta", json!(1), "rope_theta is 1, supported is above 1"),
        ("/rms_norm_eps", json!(-1.0), "rms_norm_eps is -1, supported is above 0"),
        ("/swiglu_limit", Value::Null, "swiglu_limit is missing"),
    ];
    for (pointer, value, message) in cases {
        let mut config = hugging_face();
        *config.pointer_mut(pointer).unwrap_or_else(|| panic!("nano's config has {pointer}")) = value.clone();
        let error = parse(&config).expect_err(pointer).to_string();
        assert!(error.starts_with(&format!("dir/config.json: {message}")), "{pointer} = {value}: {error}");
    }
    let mut config = hugging_face();
    config["rope_scaling"]["attention_factor"] = json!(1.0);
    assert!(parse(&config).expect_err("not yarn's").to_string().contains("rope_scaling.attention_factor is 1, "));
    for field in original().as_object().expect("an object").keys().filter(|field| *field != "num_experts") {
        let mut config = original();
        config.as_object_mut().expect("an object").remove(field);
        assert_eq!(parse(&config).expect_err(field).to_string(), format!("dir/config.json: {field} is missing"));
    }
    assert!(parse(&json!([1])).expect_err("a list").to_string().contains("not a json object"));
}

#[test]
fn stop_tokens() {
    let parse =
        |text: &str| stop_token_ids(text, Path::new("generation_config.json"), 2048).map_err(|error| error.to_string());
    assert_eq!(parse(r#"{"eos_token_id": [2020, 2017]}"#), Ok(vec![2020, 2017]));
    assert_eq!(parse(r#"{"eos_token_id": 7}"#), Ok(vec![7]));
    for (text, message) in [
        ("{}", "eos_token_id is missing"),
        (r#"{"eos_token_id": []}"#, "eos_token_id is empty, supported is at least one token"),
        (r#"{"eos_token_id": [2048]}"#, "eos_token_id is 2048, supported is below vocab_size 2048"),
        (r#"{"eos_token_id": "x"}"#, r#"eos_token_id is "x", expected a token number or a list of them"#),
    ] {
        assert_eq!(parse(text), Err(format!("generation_config.json: {message}")));
    }
}
