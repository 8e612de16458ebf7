//! The error codes of the driver API that this library gives (`CUresult` of `cuda.h`).

/// What a call of the driver API returns.
pub type CuResult = i32;

/// Done.
pub const SUCCESS: CuResult = 0;
/// A bad argument.
pub const INVALID_VALUE: CuResult = 1;
/// No memory.
pub const OUT_OF_MEMORY: CuResult = 2;
/// `cuInit` was not called, or the process forked since.
pub const NOT_INITIALIZED: CuResult = 3;
/// No GPU.
pub const NO_DEVICE: CuResult = 100;
/// No such GPU.
pub const INVALID_DEVICE: CuResult = 101;
/// The module's text holds no function.
pub const INVALID_IMAGE: CuResult = 200;
/// No context is current.
pub const INVALID_CONTEXT: CuResult = 201;
/// The system refused something.
pub const OPERATING_SYSTEM: CuResult = 304;
/// No such handle.
pub const INVALID_HANDLE: CuResult = 400;
/// No such name.
pub const NOT_FOUND: CuResult = 500;
/// Not finished yet.
pub const NOT_READY: CuResult = 600;
/// The GPU met a bad address.
pub const ILLEGAL_ADDRESS: CuResult = 700;
/// A kernel ended with a fault.
pub const LAUNCH_FAILED: CuResult = 719;
/// The driver does not permit it.
pub const NOT_PERMITTED: CuResult = 800;
/// Not on this GPU or in this library.
pub const NOT_SUPPORTED: CuResult = 801;
/// Anything else.
pub const UNKNOWN: CuResult = 999;

/// Name and description, with the zero that C wants at the end.
pub fn text(error: CuResult) -> Option<(&'static str, &'static str)> {
    Some(match error {
        SUCCESS => ("CUDA_SUCCESS\0", "no error\0"),
        INVALID_VALUE => ("CUDA_ERROR_INVALID_VALUE\0", "invalid argument\0"),
        OUT_OF_MEMORY => ("CUDA_ERROR_OUT_OF_MEMORY\0", "out of memory\0"),
        NOT_INITIALIZED => ("CUDA_ERROR_NOT_INITIALIZED\0", "initialization error\0"),
        NO_DEVICE => (
            "CUDA_ERROR_NO_DEVICE\0",
            "no CUDA-capable device is detected\0",
        ),
        INVALID_DEVICE => ("CUDA_ERROR_INVALID_DEVICE\0", "invalid device ordinal\0"),
        INVALID_IMAGE => (
            "CUDA_ERROR_INVALID_IMAGE\0",
            "device kernel image is invalid\0",
        ),
        INVALID_CONTEXT => ("CUDA_ERROR_INVALID_CONTEXT\0", "invalid device context\0"),
        OPERATING_SYSTEM => (
            "CUDA_ERROR_OPERATING_SYSTEM\0",
            "OS call failed or operation not supported on this OS\0",
        ),
        INVALID_HANDLE => ("CUDA_ERROR_INVALID_HANDLE\0", "invalid resource handle\0"),
        NOT_FOUND => ("CUDA_ERROR_NOT_FOUND\0", "named symbol not found\0"),
        NOT_READY => ("CUDA_ERROR_NOT_READY\0", "device not ready\0"),
        ILLEGAL_ADDRESS => (
            "CUDA_ERROR_ILLEGAL_ADDRESS\0",
            "an illegal memory access was encountered\0",
        ),
        LAUNCH_FAILED => ("CUDA_ERROR_LAUNCH_FAILED\0", "unspecified launch failure\0"),
        NOT_PERMITTED => ("CUDA_ERROR_NOT_PERMITTED\0", "operation not permitted\0"),
        NOT_SUPPORTED => ("CUDA_ERROR_NOT_SUPPORTED\0", "operation not supported\0"),
        UNKNOWN => ("CUDA_ERROR_UNKNOWN\0", "unknown error\0"),
        _ => return None,
    })
}
