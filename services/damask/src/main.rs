//! The `damask` command.

fn main() -> std::process::ExitCode {
    damask::main()
}
