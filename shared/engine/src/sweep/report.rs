//! A sweep as tables.

use std::fmt::{self, Write as _};

use serde_json::{Value, json};
use types::ParallelLayout;

use super::{Cell, Sweep};
use crate::roofline::Bound;

const MARKDOWN_HEAD: &str =
    "| phase | batch | context | ms | tokens/s | GB counted | TFLOP counted | bound ms | share of the bound | tokens |
|---|---|---|---|---|---|---|---|---|---|
";
const CSV_HEAD: &str =
    "model,tp,ep,dp,phase,batch,context,ms,tokens_per_s,gb_counted,tflop_counted,bound_ms,share,distinct_tokens\n";

impl Sweep {
    /// A table for people. GB and TFLOP are what the bound counts for one step; `tokens` are the different ones that its rows drew.
    #[must_use]
    pub fn markdown(&self) -> String {
        let (model, layout, chunk) = (&self.options.model, self.options.layout, self.options.chunk);
        let gpus =
            if layout.ranks() == 1 { "one GPU".to_owned() } else { format!("{layout}, {} GPUs", layout.ranks()) };
        let rate = self.copy_bytes_per_s / 1e9;
        let mut text =
            format!("# {model}, {gpus}\n\nCopy rate in this run: {rate:.0} GB/s. Prompts in chunks of {chunk}.\n");
        if let Some(link) = self.link {
            let (us, rate) = (link.all_reduce_s * 1e6, link.bytes_per_s / 1e9);
            push(
                &mut text,
                format_args!("The shortest sum over the GPUs: {us:.2} us; from one to another: {rate:.0} GB/s.\n"),
            );
        }
        push(&mut text, format_args!("\n{MARKDOWN_HEAD}"));
        for cell in &self.cells {
            let Cell { phase, batch, context, seconds, distinct_tokens, .. } = cell;
            let bound = Counted { bound: cell.bound, digits: 2, separator: " | " };
            let share = 100.0 * cell.share();
            push(
                &mut text,
                format_args!(
                    "| {} | {batch} | {context} | {:.2} | {:.0} | {bound} | {share:.0} % | {distinct_tokens} |\n",
                    phase.name(),
                    seconds * 1e3,
                    cell.tokens_per_s(),
                ),
            );
        }
        text
    }

    /// One line a cell; sweeps of several layouts may be joined under one head line.
    #[must_use]
    pub fn csv(&self) -> String {
        let ParallelLayout { tp, ep, dp } = self.options.layout;
        let mut text = CSV_HEAD.to_owned();
        for cell in &self.cells {
            let Cell { phase, batch, context, seconds, distinct_tokens, .. } = cell;
            let bound = Counted { bound: cell.bound, digits: 4, separator: "," };
            let share = cell.share();
            push(
                &mut text,
                format_args!(
                    "{},{tp},{ep},{dp},{},{batch},{context},{:.4},{:.1},{bound},{share:.4},{distinct_tokens}\n",
                    self.options.model.replace(',', ";"),
                    phase.name(),
                    seconds * 1e3,
                    cell.tokens_per_s(),
                ),
            );
        }
        text
    }

    /// Everything, for programs; `damask plan` reads it.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "model": self.options.model,
            "layout": self.options.layout,
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "link": self.link.map(|link| json!({ "all_reduce_us": link.all_reduce_s * 1e6, "bytes_per_s": link.bytes_per_s })),
            "build_seconds": self.build_seconds,
            "chunk": self.options.chunk,
            "cells": self.cells.iter().map(cell_json).collect::<Vec<Value>>(),
        })
    }
}

fn cell_json(cell: &Cell) -> Value {
    json!({
        "phase": cell.phase,
        "batch": cell.batch,
        "context": cell.context,
        "ms": cell.seconds * 1e3,
        "tokens_per_s": cell.tokens_per_s(),
        "bytes": cell.bound.bytes,
        "flops": cell.bound.flops,
        "bound_ms": cell.bound.seconds * 1e3,
        "share": cell.share(),
        "distinct_tokens": cell.distinct_tokens,
    })
}

impl fmt::Display for Cell {
    /// One line, as progress.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { phase, batch, context, seconds, distinct_tokens, .. } = self;
        let (phase, ms, share) = (phase.name(), seconds * 1e3, 100.0 * self.share());
        write!(f, "{phase} {batch} x {context}: {ms:.3} ms, {share:.0} % of the bound, {distinct_tokens} tokens")
    }
}

/// The columns of the bound.
struct Counted {
    bound: Bound,
    digits: usize,
    separator: &'static str,
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bound: Bound { bytes, flops, seconds }, digits, separator } = *self;
        let (gb, tflop, ms) = (bytes / 1e9, flops / 1e12, seconds * 1e3);
        write!(f, "{gb:.digits$}{separator}{tflop:.digits$}{separator}{ms:.digits$}")
    }
}

fn push(text: &mut String, line: fmt::Arguments<'_>) {
    text.write_fmt(line).expect("a string takes any text");
}

#[cfg(test)]
mod tests {
    use super::super::{Phase, SweepOptions};
    use super::*;
    use crate::cuda::LinkRate;

    fn sweep(layout: ParallelLayout) -> Sweep {
        let options = SweepOptions { layout, ..SweepOptions::standard("gpt-oss-20b-random".into()) };
        let bound = Bound { bytes: 8e9, flops: 2e12, seconds: 0.002 };
        let prompt = Cell { phase: Phase::Prefill, batch: 1, context: 1024, seconds: 0.025, bound, distinct_tokens: 1 };
        let step = Cell { phase: Phase::Decode, batch: 8, context: 8192, seconds: 0.004, bound, distinct_tokens: 8 };
        let link = (layout.ranks() > 1).then_some(LinkRate { all_reduce_s: 2.5e-6, bytes_per_s: 390e9 });
        Sweep { options, copy_bytes_per_s: 4.2e12, link, build_seconds: 7.0, cells: vec![prompt, step] }
    }

    #[test]
    fn every_row_has_the_columns_of_its_head() {
        for sweep in [sweep(ParallelLayout::tp(1)), sweep(ParallelLayout { tp: 4, ep: 4, dp: 1 })] {
            let (markdown, csv) = (sweep.markdown(), sweep.csv());
            let bars: Vec<usize> =
                markdown.lines().filter(|line| line.starts_with('|')).map(|line| line.matches('|').count()).collect();
            assert_eq!(bars, [11; 4], "{markdown}");
            let commas: Vec<usize> = csv.lines().map(|line| line.matches(',').count()).collect();
            assert_eq!(commas, [13; 3], "{csv}");
        }
    }

    #[test]
    fn values_have_their_units() {
        let one = sweep(ParallelLayout::tp(1));
        assert!(one.markdown().contains("| decode | 8 | 8192 | 4.00 | 2000 | 8.00 | 2.00 | 2.00 | 50 % | 8 |"));
        let csv = one.csv();
        assert!(csv.contains("gpt-oss-20b-random,1,1,1,prefill,1,1024,25.0000,40960.0,8.0000,2.0000,2.0000,0.0800,1"));
        let four = sweep(ParallelLayout { tp: 4, ep: 4, dp: 1 });
        assert!(four.markdown().starts_with("# gpt-oss-20b-random, EP4 DP1 TP4, 4 GPUs\n"));
        assert!(four.markdown().contains("over the GPUs: 2.50 us; from one to another: 390 GB/s.\n\n| phase"));
        assert_eq!(
            (one.json()["link"].clone(), four.json()["link"]["all_reduce_us"].clone()),
            (Value::Null, json!(2.5))
        );
        assert_eq!(four.json()["layout"]["tp"], 4);
    }
}
