//! The damask command, built as part of this package so that the runners always start the code they were built with.

fn main() -> std::process::ExitCode {
    damask::main()
}
