use std::sync::Arc;

use format::chat::{Answer, ChatFinish, ChatFormat, ChatStream, Delta, TurnContext};
use format::harmony::Harmony;
use types::{FinishReason, SampledToken};
use vocabulary::Vocabulary;

use super::{Flow, Piece, Turn, TurnEnd};

fn harmony() -> Harmony {
    Harmony::new(Vocabulary::o200k_harmony()).unwrap()
}

/// Tokens of a text in which the names of control tokens stand for these.
fn tokens(vocabulary: &Arc<Vocabulary>, text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    for (idx, part) in text.split("<|").enumerate() {
        let text = match part.split_once("|>") {
            Some((name, rest)) if idx > 0 => {
                tokens.push(vocabulary.special(&format!("<|{name}|>")).unwrap());
                rest
            }
            _ => part,
        };
        tokens.extend(vocabulary.encode(text));
    }
    tokens
}

/// Reads `text` up to a stop string or its end.
fn read(text: &str, stops: &[&str], reason: FinishReason) -> (Vec<Piece>, TurnEnd) {
    let harmony = harmony();
    let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let mut turn = Turn::new(ChatStream::new(harmony.parser(&TurnContext::default())), &stops);
    let mut pieces = Vec::new();
    for token in tokens(harmony.vocabulary(), text) {
        let token = SampledToken { token, logprob: Some(-0.5), top: Vec::new() };
        if turn.push(token, &mut pieces) == Flow::Stopped {
            let end = turn.finish(None, &mut pieces);
            return (pieces, end);
        }
    }
    let end = turn.finish(Some(reason), &mut pieces);
    (pieces, end)
}

fn answer(pieces: &[Piece]) -> Answer {
    let mut answer = Answer::default();
    for piece in pieces {
        answer.push(&piece.delta);
    }
    answer
}

/// The text of all tokens whose log-probabilities were given out.
fn logprob_text(pieces: &[Piece]) -> String {
    let tokens: Vec<u32> = pieces.iter().flat_map(|piece| &piece.logprobs).map(|token| token.token).collect();
    Vocabulary::o200k_harmony().decode(&tokens)
}

const REASONING: &str = "<|channel|>analysis<|message|>Stop here? No.<|end|><|start|>assistant";

#[test]
fn stop_strings_look_at_content_only_and_are_cut_out() {
    for (text, stops, content, end) in [
        ("One, two, three.", &["Stop here"][..], "One, two, three.", ChatFinish::Stop),
        ("One, two, three.", &["two"], "One, ", ChatFinish::Stop),
        ("One, two, three.", &["wo, th"], "One, t", ChatFinish::Stop),
        ("One, two, three.", &["One"], "", ChatFinish::Stop),
        ("One, two, three.", &["three.!", "three. "], "One, two, three.", ChatFinish::Stop),
        ("Straße 🦜🪿 zu", &["🪿"], "Straße 🦜", ChatFinish::Stop),
    ] {
        let (pieces, got) =
            read(&format!("{REASONING}<|channel|>final<|message|>{text}<|return|>"), stops, FinishReason::Stop);
        let answer = answer(&pieces);
        assert_eq!(answer.content.as_deref(), Some(content), "{text} {stops:?}");
        assert_eq!(answer.reasoning.as_deref(), Some("Stop here? No."));
        assert_eq!(got.reason, end);
    }
}

#[test]
fn a_stop_string_may_lie_across_two_messages() {
    let text = "<|channel|>commentary<|message|>Wait<|end|><|start|>assistant<|channel|>final<|message|>Done<|return|>";
    let (pieces, _) = read(text, &["t\nD"], FinishReason::Stop);
    assert_eq!(answer(&pieces).content.as_deref(), Some("Wai"));
    let (pieces, _) = read(text, &[], FinishReason::Stop);
    assert_eq!(answer(&pieces).content.as_deref(), Some("Wait\nDone"));
}

#[test]
fn a_call_before_the_stop_string_stays_a_call() {
    let text =
        "<|channel|>commentary to=functions.f<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>a b c";
    let (pieces, end) = read(text, &[" b"], FinishReason::Length);
    assert_eq!(end.reason, ChatFinish::ToolCalls);
    assert_eq!((answer(&pieces).tool_calls.len(), answer(&pieces).content.as_deref()), (1, Some("a")));
}

#[test]
fn logprobs_are_those_of_the_content_given_out() {
    let text = format!("{REASONING}<|channel|>final<|message|>One, two 🪿 three.<|return|>");
    for (stops, expected) in
        [(&[][..], "One, two 🪿 three."), (&["absent"], "One, two 🪿 three."), (&[" three"], "One, two 🪿")]
    {
        let (pieces, _) = read(&text, stops, FinishReason::Stop);
        assert_eq!(logprob_text(&pieces), expected, "{stops:?}");
        let given: usize = pieces
            .iter()
            .filter(|piece| !matches!(piece.delta, Delta::Content(_)))
            .map(|piece| piece.logprobs.len())
            .sum();
        assert_eq!(given, 0, "only content carries log-probabilities");
    }
}

#[test]
fn all_tokens_are_counted() {
    let text = format!("{REASONING}<|channel|>final<|message|>Hi<|return|>");
    let vocabulary = Vocabulary::o200k_harmony();
    let (_, end) = read(&text, &[], FinishReason::Stop);
    assert_eq!(end.output_tokens as usize, tokens(&vocabulary, &text).len());
    assert_eq!(end.reasoning_tokens as usize, vocabulary.encode("Stop here? No.").len());
    let (_, end) = read(REASONING, &[], FinishReason::Length);
    assert_eq!(end.reason, ChatFinish::Length);
}
