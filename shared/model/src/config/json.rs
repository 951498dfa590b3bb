//! The two dialects of config.json, and generation_config.json.

use std::path::Path;

use serde_json::{Map, Value, json};
use types::TokenId;

use super::{ConfigError, LayerKind, ModelConfig, RopeConfig, alternating_kinds};
use crate::mxfp4::BLOCK_VALUES;
use crate::scheme::{DenseFormat, ExpertFormat, WeightScheme};
use crate::{fp8, rope};

/// Bound on every size, so that no product of sizes overflows 64 bits however the file was made up.
const MAX_SIZE: usize = 1 << 24;
const MAX_LAYERS: usize = 1 << 10;
const MAX_EXPERTS: usize = 1 << 12;

/// `quantization_config.quant_method` of FP8 checkpoints: a name of our own, so that no other loader mistakes their
/// scales.
const FP8_METHOD: &str = "damask_fp8";
/// `quantization_config.scale_format`: scales are the exponents of powers of two, biased by 127.
const FP8_SCALE_FORMAT: &str = "e8m0";

pub(super) fn parse(text: &str, file: &Path) -> Result<ModelConfig, ConfigError> {
    let root = parse_object(text, file)?;
    let fields = Fields { file, prefix: "", map: &root };
    // Only the original dialect counts experts under this name; only the other one states its model type.
    let config = if fields.has("num_experts") && !fields.has("model_type") {
        from_original(&fields)?
    } else {
        from_hugging_face(&fields)?
    };
    check(&config, &fields)?;
    Ok(config)
}

pub(super) fn stop_token_ids(text: &str, file: &Path, vocab_size: usize) -> Result<Vec<TokenId>, ConfigError> {
    let root = parse_object(text, file)?;
    let fields = Fields { file, prefix: "", map: &root };
    let value = fields.require("eos_token_id")?;
    let ids = match value {
        Value::Array(ids) => ids.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut tokens = Vec::with_capacity(ids.len());
    for id in ids {
        match id.as_u64() {
            Some(id) if id < vocab_size as u64 => tokens.push(id as TokenId),
            Some(id) => return Err(fields.unsupported("eos_token_id", id, format!("below vocab_size {vocab_size}"))),
            None => return Err(fields.wrong_type("eos_token_id", id, "a token number or a list of them")),
        }
    }
    if tokens.is_empty() {
        return Err(fields.unsupported("eos_token_id", "empty", "at least one token"));
    }
    Ok(tokens)
}

/// The Hugging Face dialect of a config.
pub(super) fn write(config: &ModelConfig) -> Value {
    // A f32 printed as itself, not as the f64 nearest to it.
    let number = |value: f32| Value::from(value.to_string().parse::<f64>().expect("a number's text"));
    let kind = |kind: &LayerKind| match kind {
        LayerKind::Sliding => "sliding_attention",
        LayerKind::Full => "full_attention",
    };
    let quantization = match config.stored.experts {
        ExpertFormat::Fp8 => json!({
            "quant_method": FP8_METHOD, "weight_block_size": [fp8::BLOCK, fp8::BLOCK],
            "scale_format": FP8_SCALE_FORMAT, "dense": config.stored.dense,
        }),
        _ => json!({ "quant_method": "mxfp4" }),
    };
    json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16",
        "attention_bias": true, "hidden_act": "silu", "tie_word_embeddings": false,
        "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "intermediate_size": config.intermediate_size,
        "num_local_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.max_context_tokens,
        "sliding_window": config.window, "layer_types": config.layer_kinds.iter().map(kind).collect::<Vec<_>>(),
        "rms_norm_eps": number(config.rms_norm_eps), "swiglu_limit": number(config.swiglu_limit),
        "rope_theta": config.rope.theta,
        "rope_scaling": {
            "rope_type": "yarn", "truncate": false, "factor": config.rope.factor,
            "original_max_position_embeddings": config.rope.original_context_tokens,
            "beta_fast": config.rope.beta_fast, "beta_slow": config.rope.beta_slow,
        },
        "quantization_config": quantization,
    })
}

fn from_original(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let num_layers = fields.size("num_hidden_layers")?;
    let original_context_tokens = fields.size("initial_context_length")?;
    let factor = fields.number("rope_scaling_factor")?;
    Ok(ModelConfig {
        num_layers,
        hidden_size: fields.size("hidden_size")?,
        num_heads: fields.size("num_attention_heads")?,
        num_kv_heads: fields.size("num_key_value_heads")?,
        head_dim: fields.size("head_dim")?,
        intermediate_size: fields.size("intermediate_size")?,
        num_experts: fields.size("num_experts")?,
        experts_per_token: fields.size("experts_per_token")?,
        vocab_size: fields.size("vocab_size")?,
        max_context_tokens: (original_context_tokens as f64 * factor) as usize,
        window: fields.size("sliding_window")?,
        layer_kinds: alternating_kinds(num_layers.min(MAX_LAYERS)),
        // RMSNorm's default in the reference; this dialect has no field for it.
        rms_norm_eps: 1e-5,
        swiglu_limit: fields.number("swiglu_limit")? as f32,
        rope: RopeConfig {
            theta: fields.number("rope_theta")?,
            factor,
            original_context_tokens,
            beta_fast: fields.number("rope_ntk_beta")?,
            beta_slow: fields.number("rope_ntk_alpha")?,
        },
        stored: WeightScheme::default(),
    })
}

fn from_hugging_face(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    fields.only("model_type", Value::from("gpt_oss"), Absent::Refused)?;
    fields.only("hidden_act", Value::from("silu"), Absent::Accepted)?;
    fields.only("attention_bias", Value::from(true), Absent::Accepted)?;
    fields.only("tie_word_embeddings", Value::from(false), Absent::Accepted)?;
    let stored = fields.object("quantization_config")?.map_or_else(|| Ok(WeightScheme::default()), |of| scheme(&of))?;
    let num_layers = fields.size("num_hidden_layers")?;
    Ok(ModelConfig {
        num_layers,
        hidden_size: fields.size("hidden_size")?,
        num_heads: fields.size("num_attention_heads")?,
        num_kv_heads: fields.size("num_key_value_heads")?,
        head_dim: fields.size("head_dim")?,
        intermediate_size: fields.size("intermediate_size")?,
        num_experts: fields.size("num_local_experts")?,
        experts_per_token: fields.size_of_either("num_experts_per_tok", "experts_per_token")?,
        vocab_size: fields.size("vocab_size")?,
        max_context_tokens: fields.size("max_position_embeddings")?,
        window: fields.size("sliding_window")?,
        layer_kinds: layer_kinds(fields, num_layers)?,
        rms_norm_eps: fields.number("rms_norm_eps")? as f32,
        swiglu_limit: fields.number("swiglu_limit")? as f32,
        rope: hugging_face_rope(fields)?,
        stored,
    })
}

/// Released checkpoints say `mxfp4`; those that `damask convert` wrote say how they are cut.
fn scheme(quantization: &Fields<'_>) -> Result<WeightScheme, ConfigError> {
    let method = quantization.require("quant_method")?;
    match method.as_str() {
        Some("mxfp4") => return Ok(WeightScheme::default()),
        Some(FP8_METHOD) => {}
        _ => return Err(quantization.unsupported("quant_method", method, format!("\"mxfp4\" or \"{FP8_METHOD}\""))),
    }
    quantization.only("weight_block_size", Value::from(vec![fp8::BLOCK, fp8::BLOCK]), Absent::Refused)?;
    quantization.only("scale_format", Value::from(FP8_SCALE_FORMAT), Absent::Refused)?;
    let dense = quantization.require("dense")?;
    let dense = match dense.as_str() {
        Some("bf16") => DenseFormat::Bf16,
        Some("fp8") => DenseFormat::Fp8,
        _ => return Err(quantization.unsupported("dense", dense, "\"bf16\" or \"fp8\"")),
    };
    Ok(WeightScheme { experts: ExpertFormat::Fp8, dense })
}

fn layer_kinds(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let Some(value) = fields.get("layer_types") else {
        return Ok(alternating_kinds(num_layers.min(MAX_LAYERS)));
    };
    let Value::Array(types) = value else {
        return Err(fields.wrong_type("layer_types", value, "a list"));
    };
    if types.len() != num_layers {
        return Err(fields.unsupported(
            "layer_types",
            format!("a list of {}", types.len()),
            format!("one entry for each of {num_layers} layers"),
        ));
    }
    let kind = |(layer, value): (usize, &Value)| match value.as_str() {
        Some("sliding_attention") => Ok(LayerKind::Sliding),
        Some("full_attention") => Ok(LayerKind::Full),
        _ => Err(fields.unsupported(
            &format!("layer_types[{layer}]"),
            value,
            "\"sliding_attention\" or \"full_attention\"",
        )),
    };
    types.iter().enumerate().map(kind).collect()
}

/// The rope dictionary is `rope_scaling` in the released files and `rope_parameters` (with `rope_theta` inside) in
/// newer transformers. Reading only one of them builds plain rope without a word, which looks right on short prompts
/// (NVIDIA/TensorRT-Model-Connect#399), so one of them must be there.
fn hugging_face_rope(fields: &Fields<'_>) -> Result<RopeConfig, ConfigError> {
    let rope = match (fields.object("rope_scaling")?, fields.object("rope_parameters")?) {
        (Some(scaling), Some(parameters)) if scaling.map != parameters.map => {
            let found = "different from rope_scaling";
            return Err(fields.unsupported("rope_parameters", found, "one of the two, or both equal"));
        }
        (Some(rope), _) | (None, Some(rope)) => rope,
        (None, None) => return Err(fields.missing("rope_scaling (or rope_parameters)")),
    };
    let type_field = if rope.has("rope_type") { "rope_type" } else { "type" };
    rope.only(type_field, Value::from("yarn"), Absent::Refused)?;
    // Transformers rounds YaRN's ramp to whole channels unless this is false, and takes absence for true.
    rope.only("truncate", Value::from(false), Absent::Refused)?;
    for field in ["mscale", "mscale_all_dim"] {
        if rope.get(field).is_some() {
            return Err(rope.unsupported(field, "set", "absent"));
        }
    }
    let theta_owner = if rope.has("rope_theta") { &rope } else { fields };
    let config = RopeConfig {
        theta: theta_owner.number("rope_theta")?,
        factor: rope.number("factor")?,
        original_context_tokens: rope.size("original_max_position_embeddings")?,
        beta_fast: rope.number_or("beta_fast", 32.0)?,
        beta_slow: rope.number_or("beta_slow", 1.0)?,
    };
    let concentration = rope::concentration(&config);
    let stated = rope.number_or("attention_factor", concentration)?;
    if (stated - concentration).abs() > 1e-6 {
        return Err(rope.unsupported("attention_factor", stated, format!("0.1 ln(factor) + 1 = {concentration}")));
    }
    Ok(config)
}

/// The limits that hold for both dialects.
fn check(config: &ModelConfig, fields: &Fields<'_>) -> Result<(), ConfigError> {
    let experts_field = if fields.has("num_local_experts") { "num_local_experts" } else { "num_experts" };
    let limit = |field: &str, value: usize, max: usize| {
        if value <= max { Ok(()) } else { Err(fields.unsupported(field, value, format!("at most {max}"))) }
    };
    limit("num_hidden_layers", config.num_layers, MAX_LAYERS)?;
    limit(experts_field, config.num_experts, MAX_EXPERTS)?;
    limit("experts_per_token", config.experts_per_token, config.num_experts)?;
    limit("num_attention_heads x head_dim", config.q_width(), MAX_SIZE)?;
    let multiple = |field: &str, value: usize, of: usize| {
        if value.is_multiple_of(of) {
            Ok(())
        } else {
            Err(fields.unsupported(field, value, format!("a multiple of {of}")))
        }
    };
    multiple("hidden_size", config.hidden_size, BLOCK_VALUES)?;
    multiple("intermediate_size", config.intermediate_size, BLOCK_VALUES)?;
    multiple("head_dim", config.head_dim, 2)?;
    if !config.num_heads.is_multiple_of(config.num_kv_heads) {
        let supported = format!("a divisor of num_attention_heads {}", config.num_heads);
        return Err(fields.unsupported("num_key_value_heads", config.num_kv_heads, supported));
    }
    let positive = |field: &str, value: f64| {
        if value.is_finite() && value > 0.0 { Ok(()) } else { Err(fields.unsupported(field, value, "above 0")) }
    };
    positive("rms_norm_eps", f64::from(config.rms_norm_eps))?;
    positive("swiglu_limit", f64::from(config.swiglu_limit))?;
    check_rope(config, fields)
}

fn check_rope(config: &ModelConfig, fields: &Fields<'_>) -> Result<(), ConfigError> {
    let rope = &config.rope;
    if !(rope.theta.is_finite() && rope.theta > 1.0) {
        return Err(fields.unsupported("rope_theta", rope.theta, "above 1"));
    }
    if !(rope.factor.is_finite() && rope.factor > 1.0) {
        return Err(fields.unsupported("rope scaling factor", rope.factor, "above 1"));
    }
    if config.max_context_tokens == 0 || config.max_context_tokens > MAX_SIZE {
        let supported = format!("1 to {MAX_SIZE} tokens");
        return Err(fields.unsupported("max_position_embeddings", config.max_context_tokens, supported));
    }
    // The reference asserts the same: outside it the ramp has no meaning.
    let (low, high) = rope::ramp_bounds(rope, config.head_dim);
    if !(0.0 < low && low < high && high < config.head_dim as f64 / 2.0 - 1.0) {
        return Err(fields.unsupported(
            "rope ramp",
            format!("from channel {low} to {high}"),
            format!("0 < low < high < {} (head_dim / 2 - 1)", config.head_dim as f64 / 2.0 - 1.0),
        ));
    }
    Ok(())
}

fn parse_object(text: &str, file: &Path) -> Result<Map<String, Value>, ConfigError> {
    serde_json::from_str(text)
        .map_err(|error| ConfigError::Json { file: file.display().to_string(), reason: error.to_string() })
}

enum Absent {
    Accepted,
    Refused,
}

/// One JSON object with the place where it stands, for errors.
struct Fields<'a> {
    file: &'a Path,
    prefix: &'static str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn has(&self, field: &str) -> bool {
        self.get(field).is_some()
    }

    fn require(&self, field: &str) -> Result<&'a Value, ConfigError> {
        self.get(field).ok_or_else(|| self.missing(field))
    }

    fn object(&self, field: &'static str) -> Result<Option<Fields<'a>>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { file: self.file, prefix: field, map })),
            Some(other) => Err(self.wrong_type(field, other, "an object")),
        }
    }

    /// A count or size: a whole number from 1 to [`MAX_SIZE`].
    fn size(&self, field: &str) -> Result<usize, ConfigError> {
        let value = self.require(field)?;
        let Some(number) = value.as_u64() else {
            return Err(self.wrong_type(field, value, "a whole number"));
        };
        if number == 0 || number > MAX_SIZE as u64 {
            return Err(self.unsupported(field, number, format!("1 to {MAX_SIZE}")));
        }
        Ok(number as usize)
    }

    fn size_of_either(&self, first: &str, second: &str) -> Result<usize, ConfigError> {
        if !self.has(second) {
            return self.size(first);
        }
        let value = self.size(second)?;
        if self.has(first) && self.size(first)? != value {
            return Err(self.unsupported(second, value, format!("the same as {first}")));
        }
        Ok(value)
    }

    fn number(&self, field: &str) -> Result<f64, ConfigError> {
        let value = self.require(field)?;
        value.as_f64().ok_or_else(|| self.wrong_type(field, value, "a number"))
    }

    fn number_or(&self, field: &str, default: f64) -> Result<f64, ConfigError> {
        if self.has(field) { self.number(field) } else { Ok(default) }
    }

    /// Refuses every value but one.
    fn only(&self, field: &str, supported: Value, absent: Absent) -> Result<(), ConfigError> {
        match (self.get(field), absent) {
            (Some(value), _) if *value == supported => Ok(()),
            (Some(value), _) => Err(self.unsupported(field, value, supported)),
            (None, Absent::Accepted) => Ok(()),
            (None, Absent::Refused) => Err(self.missing(field)),
        }
    }

    fn path(&self, field: &str) -> String {
        if self.prefix.is_empty() { field.to_owned() } else { format!("{}.{field}", self.prefix) }
    }

    fn missing(&self, field: &str) -> ConfigError {
        ConfigError::Missing { file: self.file.display().to_string(), field: self.path(field) }
    }

    fn wrong_type(&self, field: &str, found: &Value, expected: &'static str) -> ConfigError {
        let file = self.file.display().to_string();
        ConfigError::Type { file, field: self.path(field), expected, found: found.to_string() }
    }

    fn unsupported(&self, field: &str, found: impl ToString, supported: impl ToString) -> ConfigError {
        ConfigError::Unsupported {
            file: self.file.display().to_string(),
            field: self.path(field),
            found: found.to_string(),
            supported: supported.to_string(),
        }
    }
}
