//! Reads Hugging Face's tokenizer.json, as far as byte-level BPE in the manner of o200k goes, and refuses the rest.

use std::collections::{HashMap, HashSet};

use bpe::byte_pair_encoding::{BytePairEncoding, find_hash_factor_for_dictionary};
use serde::Deserialize;
use serde_json::Value;
use types::TokenId;

use super::VocabularyError;
use super::split::is_o200k_pattern;

/// Longest token. Those of o200k have up to 128 bytes; the time to check one grows with the square of its length.
const TOKEN_BYTES_MAX: usize = 1_024;
/// Highest token number: tables have a place for each below it.
const TOKEN_ID_MAX: TokenId = (1 << 24) - 1;

/// What a vocabulary is built from.
pub(super) struct Parsed {
    pub(super) pairs: BytePairEncoding,
    pub(super) special_tokens: Vec<(TokenId, String)>,
}

#[derive(Deserialize)]
struct TokenizerJson {
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    pre_tokenizer: PreTokenizer,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
    special: bool,
}

#[derive(Deserialize)]
struct PreTokenizer {
    r#type: String,
    #[serde(default)]
    pretokenizers: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    r#type: String,
    pattern: Option<Pattern>,
    behavior: Option<String>,
    #[serde(default)]
    invert: bool,
    #[serde(default)]
    add_prefix_space: bool,
    #[serde(default)]
    use_regex: bool,
}

#[derive(Deserialize)]
enum Pattern {
    Regex(String),
    String(String),
}

#[derive(Deserialize)]
struct Model {
    r#type: Option<String>,
    #[serde(default)]
    dropout: Value,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    vocab: HashMap<String, TokenId>,
    merges: Vec<Merge>,
}

/// The two notations of a merge: `["a", "n"]` and `"a n"`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Spaced(String),
}

impl Merge {
    fn pair(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Spaced(both) => both.split_once(' '),
        }
    }
}

pub(super) fn parse(json: &[u8]) -> Result<Parsed, VocabularyError> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    let file: TokenizerJson = serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| VocabularyError::Malformed { field: error.path().to_string(), cause: error.into_inner() })?;
    check_normalizer(&file.normalizer)?;
    check_pre_tokenizer(&file.pre_tokenizer)?;
    check_model(&file.model)?;
    let tokens = ordinary_tokens(&file.model.vocab)?;
    check_merges(&file.model)?;
    check_reachable(&tokens)?;
    let special_tokens = special_tokens(file.added_tokens, tokens.len())?;
    let hash_factor = find_hash_factor_for_dictionary(tokens.iter().cloned());
    Ok(Parsed { pairs: BytePairEncoding::from_dictionary(tokens, Some(hash_factor)), special_tokens })
}

fn unsupported(field: impl Into<String>, found: impl ToString, supported: &'static str) -> VocabularyError {
    VocabularyError::Unsupported { field: field.into(), found: found.to_string(), supported }
}

fn inconsistent(field: impl Into<String>, reason: impl Into<String>) -> VocabularyError {
    VocabularyError::Inconsistent { field: field.into(), reason: reason.into() }
}

fn check_normalizer(normalizer: &Value) -> Result<(), VocabularyError> {
    if normalizer.is_null() { Ok(()) } else { Err(unsupported("normalizer", normalizer, "null")) }
}

fn check_pre_tokenizer(pre_tokenizer: &PreTokenizer) -> Result<(), VocabularyError> {
    const SHAPE: &str = "a Sequence of Split and ByteLevel";
    let [split, byte_level] = pre_tokenizer.pretokenizers.as_slice() else {
        return Err(unsupported("pre_tokenizer", &pre_tokenizer.r#type, SHAPE));
    };
    for (i, step, r#type) in [(0, split, "Split"), (1, byte_level, "ByteLevel")] {
        if step.r#type != r#type {
            return Err(unsupported(format!("pre_tokenizer.pretokenizers[{i}].type"), &step.r#type, SHAPE));
        }
    }
    let field = |name: &str| format!("pre_tokenizer.pretokenizers[0].{name}");
    match &split.pattern {
        Some(Pattern::Regex(pattern)) if is_o200k_pattern(pattern) => {}
        Some(Pattern::Regex(other) | Pattern::String(other)) => {
            return Err(unsupported(field("pattern"), other, "the pattern of o200k"));
        }
        None => return Err(inconsistent(field("pattern"), "is missing")),
    }
    if split.behavior.as_deref() != Some("Isolated") {
        return Err(unsupported(field("behavior"), split.behavior.as_deref().unwrap_or("missing"), "Isolated"));
    }
    if split.invert {
        return Err(unsupported(field("invert"), true, "false"));
    }
    for (name, set) in [("add_prefix_space", byte_level.add_prefix_space), ("use_regex", byte_level.use_regex)] {
        if set {
            return Err(unsupported(format!("pre_tokenizer.pretokenizers[1].{name}"), true, "false"));
        }
    }
    Ok(())
}

fn check_model(model: &Model) -> Result<(), VocabularyError> {
    if let Some(other) = model.r#type.as_deref().filter(|r#type| *r#type != "BPE") {
        return Err(unsupported("model.type", other, "BPE"));
    }
    if !model.dropout.is_null() {
        return Err(unsupported("model.dropout", &model.dropout, "null"));
    }
    if model.byte_fallback {
        return Err(unsupported("model.byte_fallback", true, "false"));
    }
    let affixes = [
        ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ];
    for (field, affix) in affixes {
        if let Some(affix) = affix.as_deref().filter(|affix| !affix.is_empty()) {
            return Err(unsupported(field, format!("{affix:?}"), "null"));
        }
    }
    Ok(())
}

/// The bytes of each token, by number. The numbers must be `0..n`: they are the ranks.
fn ordinary_tokens(vocab: &HashMap<String, TokenId>) -> Result<Vec<Vec<u8>>, VocabularyError> {
    let mut spellings: Vec<Option<&str>> = vec![None; vocab.len()];
    for (spelling, id) in vocab {
        let Some(place) = spellings.get_mut(*id as usize) else {
            let reason = format!("is {id}, but there are {} tokens", vocab.len());
            return Err(inconsistent(format!("model.vocab[{spelling:?}]"), reason));
        };
        if let Some(other) = place.replace(spelling) {
            let (first, second) = (spelling.as_str().min(other), spelling.as_str().max(other));
            return Err(inconsistent(format!("model.vocab[{second:?}]"), format!("is {id}, like {first:?}")));
        }
    }
    let bytes_of = byte_alphabet();
    let mut tokens = Vec::with_capacity(vocab.len());
    let mut has_byte = [false; 256];
    for spelling in spellings.into_iter().flatten() {
        let bytes: Option<Vec<u8>> = spelling.chars().map(|c| bytes_of.get(&c).copied()).collect();
        let Some(bytes) = bytes.filter(|bytes| !bytes.is_empty()) else {
            return Err(inconsistent(format!("model.vocab[{spelling:?}]"), "does not spell bytes"));
        };
        if bytes.len() > TOKEN_BYTES_MAX {
            let (id, length) = (tokens.len(), bytes.len());
            return Err(unsupported(
                format!("model.vocab: token {id}"),
                format!("{length} bytes long"),
                "up to 1,024 bytes",
            ));
        }
        if let [byte] = bytes.as_slice() {
            has_byte[usize::from(*byte)] = true;
        }
        tokens.push(bytes);
    }
    match has_byte.iter().position(|has| !has) {
        Some(byte) => Err(inconsistent("model.vocab", format!("has no token for the byte {byte:#04x}"))),
        None => Ok(tokens),
    }
}

/// GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others for U+0100 and up, in order.
fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let hidden = (0..=u8::MAX).filter(|byte| !printable(byte));
    let shifted = ('\u{100}'..).zip(hidden);
    (0..=u8::MAX).filter(printable).map(|byte| (char::from(byte), byte)).chain(shifted).collect()
}

/// Merges must come in the order of the tokens that they make, or a token's number would not be its rank.
fn check_merges(model: &Model) -> Result<(), VocabularyError> {
    let mut last = 0;
    for (i, merge) in model.merges.iter().enumerate() {
        let field = || format!("model.merges[{i}]");
        let (left, right) = merge.pair().ok_or_else(|| inconsistent(field(), "is not two tokens"))?;
        let made = format!("{left}{right}");
        let id_of = |token: &str| {
            model
                .vocab
                .get(token)
                .copied()
                .ok_or_else(|| inconsistent(field(), format!("{token:?} is not in model.vocab")))
        };
        id_of(left)?;
        id_of(right)?;
        let id = id_of(&made)?;
        if id < last {
            return Err(inconsistent(
                field(),
                format!("makes token {id} after token {last}: merges are not in the order of ids"),
            ));
        }
        last = id;
    }
    Ok(())
}

/// Every token must be what its own bytes encode to; the encoder's tables cannot be built otherwise.
fn check_reachable(tokens: &[Vec<u8>]) -> Result<(), VocabularyError> {
    let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(id, token)| (token.as_slice(), id)).collect();
    for (id, token) in tokens.iter().enumerate() {
        // Where the parts begin, and the end of the last one.
        let mut borders: Vec<usize> = (0..=token.len()).collect();
        while borders.len() > 2 {
            let joined = |i: usize| &token[borders[i]..borders[i + 2]];
            let best = (0..borders.len() - 2).filter_map(|i| Some((*ranks.get(joined(i))?, i))).min();
            let Some((_, i)) = best else {
                let reason = format!("token {id}, {:?}, cannot be made by merges", String::from_utf8_lossy(token));
                return Err(inconsistent("model.vocab", reason));
            };
            borders.remove(i + 1);
        }
    }
    Ok(())
}

fn special_tokens(added: Vec<AddedToken>, num_ordinary: usize) -> Result<Vec<(TokenId, String)>, VocabularyError> {
    let mut special: Vec<(TokenId, String)> = Vec::with_capacity(added.len());
    let (mut ids, mut names) = (HashSet::new(), HashSet::new());
    for (i, AddedToken { id, content, special: is_special }) in added.into_iter().enumerate() {
        if !is_special {
            return Err(unsupported(format!("added_tokens[{i}].special"), false, "true"));
        }
        if (id as usize) < num_ordinary {
            return Err(inconsistent(
                format!("added_tokens[{i}].id"),
                format!("is {id}, the number of an ordinary token"),
            ));
        }
        if id > TOKEN_ID_MAX {
            return Err(unsupported(format!("added_tokens[{i}].id"), id, "up to 16,777,215"));
        }
        if !ids.insert(id) || !names.insert(content.clone()) {
            return Err(inconsistent(format!("added_tokens[{i}]"), format!("{content:?} ({id}) is there twice")));
        }
        special.push((id, content));
    }
    Ok(special)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::Vocabulary;

    fn nano() -> Value {
        serde_json::from_slice(include_bytes!("../../model/gpt-oss-nano/tokenizer.json")).unwrap()
    }

    fn error_after(change: impl FnOnce(&mut Value)) -> String {
        let mut file = nano();
        change(&mut file);
        Vocabulary::from_tokenizer_json(&serde_json::to_vec(&file).unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn nano_loads_in_both_notations_of_merges() {
        let pairs = Vocabulary::from_tokenizer_json(&serde_json::to_vec(&nano()).unwrap()).unwrap();
        let mut file = nano();
        for merge in file["model"]["merges"].as_array_mut().unwrap() {
            *merge = json!(format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
        }
        let spaced = Vocabulary::from_tokenizer_json(&serde_json::to_vec(&file).unwrap()).unwrap();
        for vocabulary in [&pairs, &spaced] {
            assert_eq!(vocabulary.size(), 2037);
            assert_eq!(vocabulary.special("<|start|>"), Some(2024));
            assert_eq!(vocabulary.special_name(2020), Some("<|return|>"));
            assert_eq!(
                vocabulary.decode(&vocabulary.encode("What is 191 - 42?\u{1f980}")),
                "What is 191 - 42?\u{1f980}"
            );
        }
        assert_ne!(pairs.fingerprint(), spaced.fingerprint());
    }

    #[test]
    fn errors_name_the_field() {
        let long = "a".repeat(1_025);
        let cases: [(&str, String); 12] = [
            ("normalizer", error_after(|file| file["normalizer"] = json!({"type": "NFC"}))),
            ("model.type", error_after(|file| file["model"]["type"] = json!("Unigram"))),
            ("model.merges[1]", error_after(|file| file["model"]["merges"][1] = json!(["q", "zzz"]))),
            ("model.vocab[\"\\\"\"]: is 1, like \"!\"", error_after(|file| file["model"]["vocab"]["!"] = json!(1))),
            ("model.vocab[\"!\"]", error_after(|file| file["model"]["vocab"]["!"] = json!(70_000))),
            ("added_tokens[2].id", error_after(|file| file["added_tokens"][2]["id"] = json!(5))),
            ("added_tokens[2].id", error_after(|file| file["added_tokens"][2]["id"] = json!("five"))),
            ("added_tokens[2].id is 4294967295", error_after(|file| file["added_tokens"][2]["id"] = json!(u32::MAX))),
            ("added_tokens[2]", error_after(|file| file["added_tokens"][2] = file["added_tokens"][1].clone())),
            ("token 5 is 1025 bytes long", error_after(|file| respell(file, 5, &long))),
            ("added_tokens[2].special", error_after(|file| file["added_tokens"][2]["special"] = json!(false))),
            (
                "pre_tokenizer.pretokenizers[0].pattern",
                error_after(|file| file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("\\w+")),
            ),
        ];
        for (field, message) in cases {
            assert!(message.contains(field), "{message:?} does not name {field}");
        }
    }

    /// Gives token `id` another spelling.
    fn respell(file: &mut Value, id: u32, spelling: &str) {
        let vocab = file["model"]["vocab"].as_object_mut().unwrap();
        let old = vocab.iter().find(|(_, value)| **value == json!(id)).unwrap().0.clone();
        vocab.remove(&old);
        vocab.insert(spelling.to_owned(), json!(id));
    }

    #[test]
    fn merges_out_of_order_are_refused() {
        let message = error_after(|file| file["model"]["merges"].as_array_mut().unwrap().swap(3, 900));
        assert!(message.contains("not in the order of ids"), "{message}");
    }
}
