//! The table of `include/karat.h` as Rust sees it; a test holds the two together.

use std::ffi::{c_char, c_void};

/// `KARAT_ABI`
pub const ABI: u32 = 1;

/// The function that a library exports.
pub const ENTRY: &str = "karat_plugin_get";

/// `KARAT_OK`
pub(super) const OK: i32 = 0;
/// `KARAT_NOT_SUPPORTED`
pub(super) const NOT_SUPPORTED: i32 = 1;

/// `karat_attention`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)] // the header says what each is
pub struct Attention {
    pub tokens: u64,
    pub keys: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub value_dim: u64,
    pub first: u64,
    pub window: u64,
    pub scale: f64,
    pub softcap: f64,
}

/// `karat_tap`
pub(super) type TapFn = extern "C" fn(*mut c_void, *const c_char, *const f32, *const u64, u32);

type In = *const f32;
type Out = *mut f32;

/// `karat_plugin`. Fields that a library was compiled without are absent.
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)] // the header says what each is
pub struct Abi {
    pub abi: u32,
    pub size: u32,
    pub name: Option<&'static c_char>,
    pub contract: Option<&'static c_char>,
    pub linear: Option<unsafe extern "C" fn(In, In, In, Out, u64, u64, u64) -> i32>,
    pub rms_norm: Option<unsafe extern "C" fn(In, In, Out, u64, u64, f32) -> i32>,
    pub rope: Option<unsafe extern "C" fn(In, In, In, Out, u64, u64, u64, u64, i32) -> i32>,
    pub attention: Option<unsafe extern "C" fn(In, In, In, In, Out, *const Attention) -> i32>,
    pub gated_act: Option<unsafe extern "C" fn(In, In, Out, u64, i32) -> i32>,
    pub residual: Option<unsafe extern "C" fn(In, In, Out, u64, f32) -> i32>,
    pub embed: Option<unsafe extern "C" fn(*const u32, In, Out, u64, u64, u64, f32) -> i32>,
    pub load: Option<unsafe extern "C" fn(*const c_char) -> *mut c_void>,
    pub unload: Option<unsafe extern "C" fn(*mut c_void)>,
    pub reset: Option<unsafe extern "C" fn(*mut c_void) -> i32>,
    pub step_batch:
        Option<unsafe extern "C" fn(*mut c_void, *const u32, u64, Out, u64, TapFn, *mut c_void) -> i32>,
    pub state_get: Option<unsafe extern "C" fn(*mut c_void, TapFn, *mut c_void) -> i32>,
    pub state_set: Option<unsafe extern "C" fn(*mut c_void, *const c_char, In, *const u64, u32) -> i32>,
}
