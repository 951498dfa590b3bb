//! Why an operation was not enqueued.

use device::DeviceError;

/// Result of enqueuing an operation.
pub type Result<T> = std::result::Result<T, KernelError>;

/// Why an operation was not enqueued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The crate was built without nvcc.
    #[error("built without CUDA kernels: nvcc was not found at build time")]
    NotBuilt,
    /// An operand has the wrong size.
    #[error("{operation}: {operand} has {found} elements, {expected} are needed")]
    Size {
        /// The operation.
        operation: &'static str,
        /// Its operand.
        operand: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A dimension that the kernel does not take.
    #[error("{operation}: {dimension} is {found}, allowed is {allowed}")]
    Dimension {
        /// The operation.
        operation: &'static str,
        /// The dimension.
        dimension: &'static str,
        /// What the kernel takes.
        allowed: &'static str,
        /// The value given.
        found: usize,
    },
    /// MXFP4 block scales outside 2^-85 to 2^41, which the packed form cannot hold.
    #[error("{blocks} mxfp4 blocks have scales outside 2^-85 to 2^41")]
    ScaleRange {
        /// Blocks refused.
        blocks: u32,
    },
    /// The driver refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Size and dimension checks that name the operation.
#[derive(Clone, Copy)]
pub(crate) struct Checker(pub(crate) &'static str);

impl Checker {
    /// `operand` must have exactly `expected` elements.
    pub(crate) fn size(self, operand: &'static str, expected: usize, found: usize) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        Err(KernelError::Size { operation: self.0, operand, expected, found })
    }

    /// `operand` must have at least `expected` elements.
    pub(crate) fn room(self, operand: &'static str, expected: usize, found: usize) -> Result<()> {
        if found >= expected {
            return Ok(());
        }
        Err(KernelError::Size { operation: self.0, operand, expected, found })
    }

    /// What weighs and adds the outputs of a token's `top` experts: `weights` and `slot` of `[tokens, top]`, `y` with a row of `hidden` for
    /// each pair at least; all three by their lengths.
    pub(crate) fn experts(
        self,
        [tokens, top, hidden]: [usize; 3],
        weights: usize,
        slot: usize,
        y: usize,
    ) -> Result<()> {
        self.dimension("top", top, "1 to 8", (1..=8).contains(&top))?;
        self.size("weights", tokens * top, weights)?;
        self.size("slot", tokens * top, slot)?;
        self.room("y", tokens * top * hidden, y)
    }

    /// `dimension`, whose value is `found`, must satisfy `holds`.
    pub(crate) fn dimension(
        self,
        dimension: &'static str,
        found: usize,
        allowed: &'static str,
        holds: bool,
    ) -> Result<()> {
        if holds {
            return Ok(());
        }
        Err(KernelError::Dimension { operation: self.0, dimension, allowed, found })
    }
}

/// Fits a checked dimension into a kernel's 32-bit field.
pub(crate) fn int(value: usize) -> i32 {
    i32::try_from(value).expect("dimensions are checked against buffers, which hold fewer than 2^31 rows")
}
