//! The peer's part: does what the lines on its standard input say, on GPU 1.

use std::io::{BufRead, Write, stdin, stdout};

use device::nccl::UniqueId;

use crate::BOUND;
use crate::ipc::{Mapped, Way, export};
use crate::pieces::Cache;
use crate::side::{BUFFER, Side, Traffic, unhex};

pub(crate) fn serve() {
    let mut side = Side::open(1);
    let (mut mapped, mut cache, mut earlier) = (None, None, Vec::new());
    answer("ready");
    for line in stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        match words[0] {
            "join" => {
                // An earlier communicator stays open beside the new one.
                earlier.extend(side.communicator.take());
                let id = UniqueId::from_bytes(&unhex(words[1])).unwrap();
                side.join(&id, 1, number(2) as u32).unwrap();
                answer("joined");
            }
            // The last word is how often.
            "transfer" => {
                let rate = side.transfer(Traffic::named(words[1]), number(2), number(3)).unwrap();
                answer(&format!("{rate:.1}"));
            }
            "forever" => {
                let (traffic, bytes) = (Traffic::named(words[1]), number(2));
                answer("going");
                side.until_stuck(BOUND, |side| side.enqueue(traffic, bytes)).unwrap();
            }
            "export" => answer(&export(&side.stream, &side.buffer)),
            "import" => {
                mapped = Some(Mapped::open(&side.stream, words[1], BUFFER));
                answer("open");
            }
            "push" | "pull" => {
                let way = if words[0] == "push" { Way::Push } else { Way::Pull };
                push(&mut side, mapped.as_ref().unwrap(), way, number(1), number(2));
            }
            "cache" => answer(&cache.insert(Cache::new(&side)).handles(&side.stream)),
            "pages" => {
                cache.as_mut().unwrap().receive(&side, number(1), number(2) == 1);
                answer("received");
            }
            "memory" => answer(&side.device.memory_bytes().unwrap().0.to_string()),
            "close" => {
                side.communicator.take().unwrap().close(BOUND).unwrap();
                answer("closed");
            }
            other => panic!("what is {other}?"),
        }
    }
}

/// Copies `count` times and answers with the rate; for ever with a count of 0, and answers at once.
fn push(side: &mut Side, mapped: &Mapped, way: Way, bytes: usize, count: usize) {
    if count == 0 {
        answer("going");
    }
    let started = std::time::Instant::now();
    let mut copied = 0;
    while count == 0 || copied < count {
        for _ in 0..4 {
            let code = mapped.copy(&side.stream, &mut side.buffer, way, bytes);
            assert_eq!(code, cudarc::driver::sys::CUresult::CUDA_SUCCESS);
        }
        copied += 4;
        mapped.finish(BOUND).unwrap();
    }
    answer(&format!("{:.1}", (copied * bytes) as f64 / started.elapsed().as_secs_f64() / 1e9));
}

fn answer(line: &str) {
    let mut output = stdout().lock();
    writeln!(output, "{line}").unwrap();
    output.flush().unwrap();
}
