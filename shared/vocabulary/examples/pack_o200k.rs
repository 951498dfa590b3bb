//! Makes `data/o200k_base.bin.gz` from the published `o200k_base.tiktoken` (lines of base64 and rank):
//!
//! `cargo run --release -p vocabulary --example pack_o200k -- o200k_base.tiktoken shared/vocabulary/data/o200k_base.bin.gz`

use std::io::Write;

use anyhow::{Context, bail};

fn main() -> anyhow::Result<()> {
    let [source, target] =
        std::env::args().skip(1).collect::<Vec<_>>().try_into().ok().context("usage: SOURCE TARGET")?;
    let (mut lengths, mut bytes) = (Vec::new(), Vec::new());
    for (rank, line) in std::fs::read_to_string(&source)?.lines().enumerate() {
        let (token, written_rank) = line.split_once(' ').context("a line without a rank")?;
        if written_rank.parse::<usize>()? != rank {
            bail!("line {rank} has rank {written_rank}");
        }
        let token = from_base64(token)?;
        lengths.push(u8::try_from(token.len())?);
        bytes.extend(token);
    }
    let mut packed = flate2::write::GzEncoder::new(std::fs::File::create(&target)?, flate2::Compression::best());
    packed.write_all(&u32::try_from(lengths.len())?.to_le_bytes())?;
    packed.write_all(&lengths)?;
    packed.write_all(&bytes)?;
    packed.finish()?;
    Ok(())
}

fn from_base64(text: &str) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let (mut group, mut bits) = (0_u32, 0);
    for digit in text.trim_end_matches('=').bytes() {
        let six = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => bail!("{text:?} is not base64"),
        };
        group = group << 6 | u32::from(six);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((group >> bits) as u8);
        }
    }
    Ok(bytes)
}
