//! `include/karat.h` and its Rust side lay out the same bytes: a C compiler says where each field is.

use karat_device::plugin::{ABI, Abi, Attention};
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

macro_rules! offsets {
    ($type:ident: $($field:ident)*) => { vec![$((stringify!($field), offset_of!($type, $field))),*] };
}

#[test]
fn every_field_is_where_the_header_says() {
    if !Command::new("cc").arg("--version").output().is_ok_and(|out| out.status.success()) {
        eprintln!("cc is not installed: not tested");
        return;
    }
    let plugin = offsets!(Abi: abi size name contract linear rms_norm rope attention gated_act residual embed
        load unload reset step_batch state_get state_set);
    let attention =
        offsets!(Attention: tokens keys heads kv_heads head_dim value_dim first window scale softcap);
    let print = |of: &str, fields: &[(&str, usize)]| -> String {
        fields.iter().map(|(f, _)| format!("printf(\"%zu \", offsetof({of}, {f}));\n")).collect()
    };
    let source = format!(
        "#include \"karat.h\"\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n{}{}\
         printf(\"%zu %zu %d\", sizeof(karat_plugin), sizeof(karat_attention), KARAT_ABI);\n}}\n",
        print("karat_plugin", &plugin),
        print("karat_attention", &attention)
    );
    let dir = std::env::temp_dir().join(format!("karat-header-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (file, program) = (dir.join("layout.c"), dir.join("layout"));
    std::fs::write(&file, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let built = Command::new("cc")
        .args(["-Wall", "-Werror", "-I"])
        .arg(include)
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .status();
    assert!(built.unwrap().success());
    let said = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();

    let ours = plugin.iter().chain(&attention).map(|(_, offset)| *offset);
    let ours = ours.chain([size_of::<Abi>(), size_of::<Attention>(), ABI as usize]);
    let said: Vec<usize> = said.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert_eq!(said, ours.collect::<Vec<_>>());
}
