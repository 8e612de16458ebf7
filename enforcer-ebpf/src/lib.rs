//! Present only so that the user crate can name this crate as a build dependency.
#![no_std]
