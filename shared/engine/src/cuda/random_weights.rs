//! Weights without a checkpoint: random numbers, made once on the host as tables and spread over the tensors by copies
//! on the device, so that 65 GB take seconds. Equal seeds and layouts give equal weights; the parts of two ranks are not
//! those of one whole.
//!
//! Projections and head are N(0, 1 / fan_in), the output projection a quarter of that (attention averages tokens: at
//! full scale all of them drift to the same experts), embedding and sinks N(0, 1), norms 1 + N(0, 0.05), biases N(0,
//! 0.02), the router's N(0, 0.1). Expert codes are uniform over the 16 values of E2M1, block scales over 2^-9 to 2^-7:
//! an expert's output is O(1).

use std::collections::BTreeMap;
use std::f64::consts::TAU;

use bytemuck::Pod;
use device::{DeviceBuffer, Stream, ViewMut};
use half::bf16;
use kernels::KvFormat;
use model::{E4M3, LayerParam, ModelConfig, Param};
use types::SplitMix64;

use super::weights::TensorSource;
use crate::EngineError;

/// Elements of a table: a prime, so that rows of a matrix do not repeat in step with it.
const TABLE: usize = 8_388_593;
/// Block scales: 2^-9, 2^-8, 2^-7 with E8M0's bias of 127.
const SCALES: std::ops::Range<u64> = 118..121;

/// Makes any tensor of a model from the seed and the tensor's name.
pub(crate) struct RandomTensors {
    stream: Stream,
    seed: u64,
    /// For tensors of which each rank has a part.
    part_seed: u64,
    /// Numbers for a tensor of the model; keyed by mean and standard deviation in millionths.
    normal: BTreeMap<(u32, u32), DeviceBuffer<bf16>>,
    /// Standard normal.
    numbers: Vec<f32>,
    codes: DeviceBuffer<u8>,
    scales: DeviceBuffer<u8>,
    hidden: usize,
    q_width: usize,
}

impl RandomTensors {
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn new(config: &ModelConfig, seed: u64, rank: usize, stream: &Stream) -> Result<Self, EngineError> {
        let mut random = SplitMix64(seed);
        let codes: Vec<u8> = (0..TABLE).map(|_| random.next() as u8).collect();
        let scales: Vec<u8> =
            (0..TABLE).map(|_| (SCALES.start + random.below(SCALES.end - SCALES.start)) as u8).collect();
        Ok(Self {
            seed,
            part_seed: if rank == 0 { seed } else { seed ^ hash(&format!("rank {rank}")) },
            normal: BTreeMap::new(),
            numbers: (0..TABLE.div_ceil(2)).flat_map(|_| normal_pair(&mut random)).take(TABLE).collect(),
            codes: stream.upload(&codes)?,
            scales: stream.upload(&scales)?,
            hidden: config.hidden_size,
            q_width: config.q_width(),
            stream: stream.clone(),
        })
    }

    /// Standard normal numbers for a cache.
    ///
    /// # Errors
    /// [`EngineError::Gpu`].
    pub(crate) fn fill_cache(&mut self, format: KvFormat, out: ViewMut<'_, u8>) -> Result<(), EngineError> {
        let table: Vec<u8> = match format {
            KvFormat::Bf16 => self.numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            KvFormat::E4M3 => self.numbers.iter().map(|x| E4M3::from_f32(*x).0).collect(),
        };
        let table = self.stream.upload(&table)?;
        spread(&self.stream, &table, format.bytes(), self.part_seed ^ hash("cache"), out)
    }

    /// The same on all ranks for what all of them hold whole.
    fn seed_of(&self, param: Param) -> u64 {
        use LayerParam::{AttnNorm, DownBias, MlpNorm, OBias, RouterBias, RouterWeight};
        let whole = matches!(
            param,
            Param::Embedding
                | Param::FinalNorm
                | Param::Layer(_, AttnNorm | DownBias | MlpNorm | OBias | RouterBias | RouterWeight)
        );
        if whole { self.seed } else { self.part_seed }
    }

    fn fill_normal(
        &mut self,
        seed: u64,
        name: &str,
        mean: f64,
        deviation: f64,
        out: ViewMut<'_, bf16>,
    ) -> Result<(), EngineError> {
        let key = ((mean * 1e6) as u32, (deviation * 1e6) as u32);
        if !self.normal.contains_key(&key) {
            let scaled = |x: &f32| bf16::from_f64(mean + deviation * f64::from(*x));
            let table: Vec<bf16> = self.numbers.iter().map(scaled).collect();
            self.normal.insert(key, self.stream.upload(&table)?);
        }
        spread(&self.stream, &self.normal[&key], 1, seed ^ hash(name), out)
    }
}

impl TensorSource for RandomTensors {
    fn values(&mut self, param: Param, out: ViewMut<'_, bf16>) -> Result<(), EngineError> {
        let from_hidden = (self.hidden as f64).powf(-0.5);
        let (mean, deviation) = match param {
            Param::Embedding => (0.0, 1.0),
            Param::FinalNorm => (1.0, 0.05),
            Param::Head => (0.0, from_hidden),
            Param::HeadScales => unreachable!("random weights have the released form"),
            Param::Layer(_, param) => match param {
                LayerParam::AttnNorm | LayerParam::MlpNorm => (1.0, 0.05),
                LayerParam::Sinks => (0.0, 1.0),
                LayerParam::OWeight => (0.0, 0.25 * (self.q_width as f64).powf(-0.5)),
                LayerParam::QWeight | LayerParam::KWeight | LayerParam::VWeight | LayerParam::RouterWeight => {
                    (0.0, from_hidden)
                }
                LayerParam::RouterBias => (0.0, 0.1),
                _ => (0.0, 0.02),
            },
        };
        self.fill_normal(self.seed_of(param), &param.to_string(), mean, deviation, out)
    }

    fn bytes(&mut self, param: Param, out: ViewMut<'_, u8>) -> Result<(), EngineError> {
        let is_scale = matches!(param, Param::Layer(_, LayerParam::GateUpScales | LayerParam::DownScales));
        let table = if is_scale { &self.scales } else { &self.codes };
        spread(&self.stream, table, 1, self.part_seed ^ hash(&param.to_string()), out)
    }
}

/// Fills `out` with pieces of `table` that begin at random multiples of `unit`.
fn spread<T: Pod>(
    stream: &Stream,
    table: &DeviceBuffer<T>,
    unit: usize,
    seed: u64,
    mut out: ViewMut<'_, T>,
) -> Result<(), EngineError> {
    let mut random = SplitMix64(seed);
    let mut at = 0;
    while at < out.len() {
        let from = random.below(table.len() as u64 / 2) as usize / unit * unit;
        let len = (table.len() - from).min(out.len() - at);
        stream.copy(out.reborrow().slice(at..at + len), table.slice(from..from + len))?;
        at += len;
    }
    Ok(())
}

/// FNV-1a.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Two independent standard normal numbers (Box and Muller).
fn normal_pair(random: &mut SplitMix64) -> [f32; 2] {
    let (radius, angle) = ((-2.0 * random.uniform().ln()).sqrt(), TAU * random.uniform());
    [(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_standard_normal() {
        let mut random = SplitMix64(3);
        let numbers: Vec<f64> = (0..50_000).flat_map(|_| normal_pair(&mut random)).map(f64::from).collect();
        let moment = |power: i32| numbers.iter().map(|x| x.powi(power)).sum::<f64>() / numbers.len() as f64;
        // Standard errors over 100,000 numbers: 0.003, 0.0045, 0.03.
        assert!(moment(1).abs() < 0.015, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.025, "variance {}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.15, "fourth moment {}", moment(4));
    }
}
