//! Timing and tables.

use device::{Device, DeviceBuffer, DeviceError, Stream};
use half::bf16;
use kernels::{KernelError, Kernels, KvCache, KvFormat};
use model::E4M3;

/// A device, and the rate that everything is compared with.
pub(crate) struct Bench {
    device: Device,
    pub(crate) stream: Stream,
    pub(crate) kernels: Kernels,
    copy_gb_per_s: f64,
    random: Vec<u8>,
}

const REPLAYS: usize = 9;
const RANDOM_BYTES: usize = 32 << 20;

impl Bench {
    pub(crate) fn open() -> Option<Self> {
        if !kernels::AVAILABLE {
            eprintln!("skipped: built without nvcc");
            return None;
        }
        let device = match Device::open(0) {
            Ok(device) => device,
            Err(DeviceError::Unavailable { reason }) => {
                eprintln!("skipped: {reason}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let stream = device.stream().unwrap();
        let kernels = Kernels::load(&device).unwrap();
        let mut state = 1_u64;
        let random = std::iter::repeat_with(|| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            ((state >> 40) as u32).to_le_bytes()[0]
        })
        .take(RANDOM_BYTES)
        .collect();
        let mut bench = Self { device, stream, kernels, copy_gb_per_s: 1.0, random };
        bench.copy_gb_per_s = bench.measure_copy();
        Some(bench)
    }

    pub(crate) fn device_name(&self) -> String {
        self.device.name().unwrap()
    }

    pub(crate) fn copy_gb_per_s(&self) -> f64 {
        self.copy_gb_per_s
    }

    /// Best of several large copies: what the memory gives, before any kernel of ours.
    fn measure_copy(&self) -> f64 {
        const BYTES: usize = 4 << 30;
        let mut source = self.stream.allocate::<u8>(BYTES).unwrap();
        let mut target = self.stream.allocate::<u8>(BYTES).unwrap();
        self.fill(&mut source);
        let copy = |target: &mut DeviceBuffer<u8>| {
            let start = self.stream.record().unwrap();
            self.stream.copy(target.view_mut(), source.view()).unwrap();
            let end = self.stream.record().unwrap();
            end.wait().unwrap();
            end.elapsed_us(&start).unwrap()
        };
        let best = (0..8).map(|_| copy(&mut target)).fold(f64::INFINITY, f64::min);
        2.0 * BYTES as f64 / best / 1e3
    }

    /// Microseconds of one of `launches` launches; `enqueue(i)` puts the i-th on the stream.
    pub(crate) fn time(&self, launches: usize, mut enqueue: impl FnMut(usize) -> Result<(), KernelError>) -> f64 {
        let mut graph = self.stream.capture::<KernelError>(|_| (0..launches).try_for_each(&mut enqueue)).unwrap();
        let mut times = Vec::new();
        for replay in 0..REPLAYS + 2 {
            let start = self.stream.record().unwrap();
            graph.launch(&self.stream).unwrap();
            let end = self.stream.record().unwrap();
            end.wait().unwrap();
            if replay >= 2 {
                times.push(end.elapsed_us(&start).unwrap() / launches as f64);
            }
        }
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }

    /// Fills memory with random bytes, the same ones over and over.
    pub(crate) fn fill(&self, buffer: &mut DeviceBuffer<u8>) {
        let len = buffer.len();
        for start in (0..len).step_by(RANDOM_BYTES) {
            let end = len.min(start + RANDOM_BYTES);
            self.stream.copy_from_host(buffer.slice_mut(start..end), &self.random[..end - start]).unwrap();
        }
    }

    /// `len` random values between -1 and 1.
    pub(crate) fn values(&self, len: usize) -> DeviceBuffer<bf16> {
        let chunk: Vec<bf16> =
            self.random.iter().take(len).map(|byte| bf16::from_f32(f32::from(*byte) / 128.0 - 1.0)).collect();
        let mut buffer = self.stream.allocate(len).unwrap();
        for start in (0..len).step_by(chunk.len()) {
            let end = len.min(start + chunk.len());
            self.stream.copy_from_host(buffer.slice_mut(start..end), &chunk[..end - start]).unwrap();
        }
        buffer
    }

    /// Fills a cache with values between -1 and 1.
    pub(crate) fn fill_cache(&self, cache: &mut KvCache) {
        let value = |byte: &u8| f32::from(*byte) / 128.0 - 1.0;
        let bytes: Vec<u8> = match cache.format {
            KvFormat::Bf16 => self.random.iter().flat_map(|byte| bf16::from_f32(value(byte)).to_le_bytes()).collect(),
            KvFormat::E4M3 => self.random.iter().map(|byte| E4M3::from_f32(value(byte)).0).collect(),
        };
        let len = cache.pool.len();
        for start in (0..len).step_by(bytes.len()) {
            let end = len.min(start + bytes.len());
            self.stream.copy_from_host(cache.pool.slice_mut(start..end), &bytes[..end - start]).unwrap();
        }
    }

    pub(crate) fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> DeviceBuffer<T> {
        self.stream.upload(values).unwrap()
    }

    pub(crate) fn zeros<T: bytemuck::Pod>(&self, len: usize) -> DeviceBuffer<T> {
        self.stream.zeros(len).unwrap()
    }

    pub(crate) fn heading(&self, title: &str) {
        println!("## {title}\n");
        println!("| kernel | shape | us | MB | GB/s | share of copy rate | TFLOP/s |");
        println!("|---|---|---|---|---|---|---|");
    }

    pub(crate) fn row(&self, kernel: &str, shape: &str, us: f64, bytes: usize) {
        let rate = bytes as f64 / us / 1e3;
        let (megabytes, share) = (bytes as f64 / 1e6, 100.0 * rate / self.copy_gb_per_s);
        println!("| {kernel} | {shape} | {us:.2} | {megabytes:.2} | {rate:.0} | {share:.0} % | |");
    }

    pub(crate) fn row_flops(&self, kernel: &str, shape: &str, us: f64, bytes: usize, flops: usize) {
        let rate = bytes as f64 / us / 1e3;
        let (megabytes, share) = (bytes as f64 / 1e6, 100.0 * rate / self.copy_gb_per_s);
        let tflops = flops as f64 / us / 1e6;
        println!("| {kernel} | {shape} | {us:.2} | {megabytes:.2} | {rate:.0} | {share:.0} % | {tflops:.0} |");
    }
}
