//! Compiles `proto/` without protoc and keeps the descriptors for reflection.

use std::path::PathBuf;

use prost::Message;

const ROOT: &str = "../../proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={ROOT}");
    let mut files = Vec::new();
    for entry in std::fs::read_dir(format!("{ROOT}/damask/v1"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path.strip_prefix(ROOT)?.to_owned());
        }
    }
    files.sort();
    let descriptors = protox::compile(files, [ROOT])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
