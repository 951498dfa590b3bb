//! Structs that cross to kernels by value or in memory: each is declared once here and once in CUDA, and both must lie alike.
//!
//! [`kernel_args`] and [`kernel_struct`] declare the Rust side. A test reads the CUDA side's text and compares names, order, types, offsets
//! and sizes, so it needs neither GPU nor compiler; sizes are asserted by both compilers besides.

/// Declares the argument struct of a kernel: `struct NAME = CudaName in "operation/file.cu" { .. }`.
macro_rules! kernel_args {
    ($(#[$attribute:meta])* struct $name:ident = $cuda:ident in $file:literal { $($fields:tt)* }) => {
        kernel_struct! {
            $(#[$attribute])*
            #[derive(Clone, Copy)]
            struct $name = $cuda in $file as ARGS { $($fields)* }
        }
        // SAFETY: `#[repr(C)]`, and the tests of `abi` find the fields where the kernel's only parameter has them.
        unsafe impl device::KernelArgs for $name {}
    };
}

/// Declares a struct that kernels read: as [`kernel_args`], with its visibility, what it derives, and the name of its layout.
macro_rules! kernel_struct {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident = $cuda:ident in $file:literal as $layout:ident {
            $($(#[$field_attribute:meta])* $field_visibility:vis $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$attribute])*
        #[repr(C)]
        $visibility struct $name {
            $($(#[$field_attribute])* $field_visibility $field: $type,)*
        }

        #[cfg(test)]
        pub(crate) const $layout: crate::abi::Layout = crate::abi::Layout {
            cuda: stringify!($cuda),
            file: $file,
            source: include_str!(concat!("../cuda/", $file)),
            bytes: size_of::<$name>(),
            fields: &[$(crate::abi::Field {
                name: stringify!($field),
                kind: stringify!($type),
                offset: std::mem::offset_of!($name, $field),
                bytes: size_of::<$type>(),
            }),*],
        };
    };
}

/// Where the fields of a struct lie in Rust, and the text that says where CUDA has them.
#[cfg(test)]
pub(crate) struct Layout {
    pub(crate) cuda: &'static str,
    pub(crate) file: &'static str,
    pub(crate) source: &'static str,
    pub(crate) bytes: usize,
    pub(crate) fields: &'static [Field],
}

#[cfg(test)]
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    /// The type as it is written.
    pub(crate) kind: &'static str,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::inbox::MAX_RANKS;

    /// Every one; the test below finds what is missing.
    const LAYOUTS: [Layout; 25] = [
        crate::all_gather::ARGS,
        crate::all_reduce::ARGS,
        crate::combine::ARGS,
        crate::decode_attention::ARGS,
        crate::dispatch::ARGS,
        crate::embed::ARGS,
        crate::fp8_gemm::ARGS,
        crate::gather_rows::ARGS,
        crate::gather_tokens::ARGS,
        crate::kv_move::ARGS,
        crate::pack_fp8::ARGS,
        crate::pack_weights::ARGS,
        crate::prefill_attention::ARGS,
        crate::quantize_rows::ARGS,
        crate::reduce_scatter::ARGS,
        crate::rmsnorm::ARGS,
        crate::rope_kv::ARGS,
        crate::router::ARGS,
        crate::sample::ARGS,
        crate::sample::ROW,
        crate::skinny_experts::ARGS,
        crate::skinny_gemm::ARGS,
        crate::sum_ranks::ARGS,
        crate::tile_gemm::ARGS,
        crate::unpack_kv::ARGS,
    ];

    /// A field as CUDA declares it.
    #[derive(Debug, PartialEq)]
    struct Declared {
        name: String,
        /// The name of its type, of what it points to if it is a pointer.
        of: String,
        is_pointer: bool,
        is_const: bool,
        count: usize,
    }

    impl Declared {
        /// From `const float* parts[MAX_RANKS]`.
        fn parse(text: &str) -> Self {
            let (text, count) = match text.split_once('[') {
                None => (text, 1),
                Some((before, count)) => {
                    let term = |term: &str| match term.trim() {
                        "MAX_RANKS" => MAX_RANKS,
                        number => number.parse().expect("a number or MAX_RANKS"),
                    };
                    (before, count.trim_end_matches(']').split('+').map(term).sum())
                }
            };
            let (of, name) = text.trim().rsplit_once([' ', '*']).expect("a type and a name");
            let (is_pointer, is_const) = (text.contains('*'), text.trim().starts_with("const "));
            let of = of.trim().trim_start_matches("const ").trim_end_matches('*').trim().to_owned();
            Self { name: name.to_owned(), of, is_pointer, is_const, count }
        }

        /// Bytes of one element, and its alignment.
        fn element(&self) -> [usize; 2] {
            match self.of.as_str() {
                _ if self.is_pointer => [8, 8],
                "uint64_t" | "int64_t" => [8, 8],
                "uint32_t" | "int32_t" | "float" => [4, 4],
                "ptx::TensorMap" => [128, 128],
                "SkinnyArgs" => [crate::skinny_gemm::ARGS.bytes, 8],
                other => panic!("{}: the size of {other} is unknown", self.name),
            }
        }

        /// Whether a Rust type says the same: numbers by kind, pointers by what may be done with them. An address may be any pointer's.
        fn is_kind(&self, kind: &str) -> bool {
            let element = kind.strip_prefix('[').and_then(|array| array.split_once(';')).map_or(kind, |array| array.0);
            if self.is_pointer {
                let pointer = if self.is_const { "DevicePtr<" } else { "DevicePtrMut<" };
                return element == "u64" || element.starts_with(pointer);
            }
            let same = match self.of.as_str() {
                "uint64_t" => "u64",
                "int64_t" => "i64",
                "uint32_t" => "u32",
                "int32_t" => "i32",
                "float" => "f32",
                other => other.trim_start_matches("ptx::"),
            };
            element == same
        }
    }

    /// The fields of a struct in CUDA source.
    fn declared(source: &str, name: &str) -> Vec<Declared> {
        let start = format!("\nstruct {name} {{\n");
        let body = source.split_once(&start).unwrap_or_else(|| panic!("there is no struct {name}")).1;
        let body = body.split_once("\n};").expect("the struct ends").0;
        let code: String = body.lines().map(|line| line.split("//").next().expect("a line has a beginning")).collect();
        let fields = code.split(';').filter(|field| !field.trim().is_empty());
        fields.map(Declared::parse).collect()
    }

    fn check(layout: &Layout) {
        let case = format!("{} in {}", layout.cuda, layout.file);
        let declared = declared(layout.source, layout.cuda);
        let (fields, tail) = layout.fields.split_at(declared.len().min(layout.fields.len()));
        assert_eq!(fields.len(), declared.len(), "{case}: CUDA has more fields");
        let (mut offset, mut alignment) = (0_usize, 1);
        for (field, declared) in fields.iter().zip(&declared) {
            let [element, its_alignment] = declared.element();
            offset = offset.next_multiple_of(its_alignment);
            alignment = alignment.max(its_alignment);
            assert_eq!(field.name, declared.name, "{case}");
            assert!(declared.is_kind(field.kind), "{case}: {field:?} is {declared:?}");
            assert_eq!((field.offset, field.bytes), (offset, element * declared.count), "{case}: {field:?}");
            offset += field.bytes;
        }
        assert_eq!(layout.bytes, offset.next_multiple_of(alignment), "{case}");
        // What CUDA leaves empty at the end for alignment.
        assert!(tail.iter().all(|field| field.name == "padding"), "{case}: Rust has more fields, {tail:?}");
    }

    #[test]
    fn structs_lie_as_kernels_read_them() {
        LAYOUTS.iter().for_each(check);
    }

    #[test]
    fn no_argument_struct_is_missed() {
        let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let mut found = Vec::new();
        for operation in std::fs::read_dir(&cuda).unwrap() {
            for file in std::fs::read_dir(operation.unwrap().path()).unwrap() {
                let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
                let structs = text.lines().filter_map(|line| line.strip_prefix("struct ")?.strip_suffix(" {"));
                found.extend(structs.filter(|name| name.ends_with("Args")).map(str::to_owned));
            }
        }
        found.sort_unstable();
        let mut known: Vec<&str> =
            LAYOUTS.iter().map(|layout| layout.cuda).filter(|name| *name != "SampleRow").collect();
        known.sort_unstable();
        assert_eq!(found, known);
    }

    #[test]
    fn a_difference_is_found() {
        const SOURCE: &str = "\nstruct Some {\n    const float* in;  // read\n    int32_t rows;\n    int32_t parts[MAX_RANKS + 1];\n};\n";
        let field = |name, kind, offset, bytes| Field { name, kind, offset, bytes };
        let input = || field("in", "DevicePtr<f32>", 0, 8);
        let parts = || field("parts", "[i32; MAX_RANKS + 1]", 12, 36);
        let is_found = |bytes, fields: [Field; 3]| {
            let fields: &'static [Field] = Box::leak(Box::new(fields));
            let layout = Layout { cuda: "Some", file: "some.cu", source: SOURCE, bytes, fields };
            std::panic::catch_unwind(|| check(&layout)).is_err()
        };
        assert!(!is_found(48, [input(), field("rows", "i32", 8, 4), parts()]));
        assert!(is_found(56, [input(), field("rows", "i32", 8, 4), parts()]), "size");
        assert!(is_found(48, [input(), field("cols", "i32", 8, 4), parts()]), "name");
        assert!(is_found(48, [input(), field("rows", "f32", 8, 4), parts()]), "kind");
        assert!(is_found(48, [input(), field("rows", "i32", 12, 4), parts()]), "offset");
        assert!(is_found(48, [field("in", "DevicePtrMut<f32>", 0, 8), field("rows", "i32", 8, 4), parts()]), "const");
        assert!(is_found(48, [parts(), field("rows", "i32", 8, 4), input()]), "order");
    }
}
