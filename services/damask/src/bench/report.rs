//! What many requests saw, as tables.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::client::Seen;

/// One number of clients with one length of prompts.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Case {
    pub(super) clients: usize,
    pub(super) input_tokens: usize,
    pub(super) seconds: f64,
    pub(super) failed: usize,
    pub(super) first_error: Option<String>,
    seen: Vec<Seen>,
}

impl Case {
    pub(super) fn new(clients: usize, input_tokens: usize, seconds: f64, all: Vec<Result<Seen, String>>) -> Self {
        let (mut seen, mut failed, mut first_error) = (Vec::new(), 0, None);
        for outcome in all {
            match outcome {
                Ok(one) => seen.push(one),
                Err(error) => {
                    failed += 1;
                    first_error.get_or_insert(error);
                }
            }
        }
        Self { clients, input_tokens, seconds, failed, first_error, seen }
    }

    fn first_token_ms(&self) -> Percentiles {
        Percentiles::of(self.seen.iter().map(|seen| 1e3 * seen.first_token_s))
    }

    /// Of each request: its time after the first token by its tokens after the first.
    fn per_token_ms(&self) -> Percentiles {
        let several = self.seen.iter().filter(|seen| seen.output_tokens > 1);
        Percentiles::of(several.map(|seen| 1e3 * seen.rest_s / (seen.output_tokens - 1) as f64))
    }

    fn gap_ms(&self) -> Percentiles {
        Percentiles::of(self.seen.iter().flat_map(|seen| &seen.gaps_s).map(|gap| 1e3 * gap))
    }

    fn sum(&self, part: impl Fn(&Seen) -> u64) -> u64 {
        self.seen.iter().map(part).sum()
    }

    fn output_tokens_per_s(&self) -> f64 {
        self.sum(|seen| seen.output_tokens) as f64 / self.seconds
    }

    fn prompt_tokens_per_s(&self) -> f64 {
        self.sum(|seen| seen.prompt_tokens) as f64 / self.seconds
    }
}

/// Nearest ranks; 0 of nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Percentiles {
    p50: f64,
    p90: f64,
    p99: f64,
}

impl Percentiles {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let rank = |share: f64| {
            let rank = (share * sorted.len() as f64).ceil() as usize;
            sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Self { p50: rank(0.5), p90: rank(0.9), p99: rank(0.99) }
    }

    fn json(self) -> Value {
        json!({"p50": self.p50, "p90": self.p90, "p99": self.p99})
    }
}

/// All cases.
pub(super) struct Report {
    model: String,
    output_tokens: usize,
    pub(super) cases: Vec<Case>,
}

const HEAD: &str = "| input tokens | clients | requests | failed | TTFT ms p50 | p90 | p99 | ms a token p50 | p99 | gap ms p99 | output tokens/s | \
                    input tokens/s |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n";

impl Report {
    pub(super) const fn new(model: String, output_tokens: usize) -> Self {
        Self { model, output_tokens, cases: Vec::new() }
    }

    /// One line, as a case ends.
    pub(super) fn progress(&self, case: &Case) -> String {
        let (first, each) = (case.first_token_ms(), case.per_token_ms());
        let mut line = format!(
            "{} x {} tokens: first token {:.1} ms, then {:.2} ms each, {:.0} tokens/s",
            case.clients,
            case.input_tokens,
            first.p50,
            each.p50,
            case.output_tokens_per_s()
        );
        if let Some(error) = &case.first_error {
            line += &format!("; {} failed: {error}", case.failed);
        }
        line
    }

    /// A table for people.
    ///
    /// # Errors
    /// Never: a string takes any text.
    pub(super) fn markdown(&self) -> Result<String, std::fmt::Error> {
        let Self { model, output_tokens, cases } = self;
        let mut text = format!(
            "{model} over HTTP, up to {output_tokens} output tokens. TTFT: to the first token. `ms a token`: of each request, its time after that by its \
             tokens; gaps lie between two events of one stream.\n\n{HEAD}"
        );
        for case in cases {
            let (first, each, gap) = (case.first_token_ms(), case.per_token_ms(), case.gap_ms());
            writeln!(
                text,
                "| {} | {} | {} | {} | {:.1} | {:.1} | {:.1} | {:.2} | {:.2} | {:.1} | {:.0} | {:.0} |",
                case.input_tokens,
                case.clients,
                case.seen.len() + case.failed,
                case.failed,
                first.p50,
                first.p90,
                first.p99,
                each.p50,
                each.p99,
                gap.p99,
                case.output_tokens_per_s(),
                case.prompt_tokens_per_s(),
            )?;
        }
        let sum = |part: fn(&Seen) -> u64| cases.iter().map(|case| case.sum(part)).sum::<u64>();
        let (cached, all) = (sum(|seen| seen.cached_tokens), sum(|seen| seen.prompt_tokens));
        if cached > 0 {
            writeln!(
                text,
                "\n{cached} of {all} prompt tokens were cached, not computed: another `--seed`, or prefill with `prefix_reuse: false`, measures them all."
            )?;
        }
        Ok(text)
    }

    /// Everything, for programs. Times in ms.
    pub(super) fn json(&self) -> Value {
        let case = |case: &Case| {
            json!({
                "input_tokens": case.input_tokens,
                "clients": case.clients,
                "requests": case.seen.len() + case.failed,
                "failed": case.failed,
                "first_error": case.first_error,
                "seconds": case.seconds,
                "first_token_ms": case.first_token_ms().json(),
                "per_token_ms": case.per_token_ms().json(),
                "gap_ms": case.gap_ms().json(),
                "prompt_tokens": case.sum(|seen| seen.prompt_tokens),
                "cached_tokens": case.sum(|seen| seen.cached_tokens),
                "output_tokens": case.sum(|seen| seen.output_tokens),
                "output_tokens_per_s": case.output_tokens_per_s(),
            })
        };
        let cases: Vec<Value> = self.cases.iter().map(case).collect();
        json!({"model": self.model, "output_tokens_max": self.output_tokens, "cases": cases})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let hundred = Percentiles::of((1..=100).rev().map(f64::from));
        assert_eq!(hundred, Percentiles { p50: 50.0, p90: 90.0, p99: 99.0 });
        assert_eq!(Percentiles::of([7.0].into_iter()), Percentiles { p50: 7.0, p90: 7.0, p99: 7.0 });
        assert_eq!(Percentiles::of(std::iter::empty()).p99, 0.0);
    }

    #[test]
    fn a_case_counts_tokens_and_failures() {
        let seen = |first_token_s, output_tokens| Seen {
            first_token_s,
            rest_s: 0.9,
            gaps_s: vec![0.3; 3],
            prompt_tokens: 1000,
            cached_tokens: 0,
            output_tokens,
        };
        let case = Case::new(2, 1000, 2.0, vec![Ok(seen(0.25, 10)), Err("503".into()), Ok(seen(0.5, 1))]);
        let mut report = Report::new("gpt-oss-20b-random".into(), 10);
        assert!(report.progress(&case).ends_with("1 failed: 503"));
        report.cases.push(case);
        let text = report.markdown().unwrap();
        let row = "| 1000 | 2 | 3 | 1 | 250.0 | 500.0 | 500.0 | 100.00 | 100.00 | 300.0 | 6 | 1000 |";
        assert!(text.contains(row), "{text}");
        assert!(!text.contains("cached"), "{text}");
        assert_eq!(report.json()["cases"][0]["first_token_ms"]["p90"], 500.0);
        report.cases.push(Case::new(1, 1000, 2.0, vec![Ok(Seen { cached_tokens: 960, ..seen(0.1, 10) })]));
        assert!(report.markdown().unwrap().contains("960 of 3000 prompt tokens were cached"));
        assert_eq!(report.json()["cases"][1]["cached_tokens"], 960);
    }
}
