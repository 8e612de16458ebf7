//! What a mapped file says about its functions: their names, and how their frames are undone.
//!
//! Files are the tenants' to make: as in [`crate::launch::symbols`] everything is read in bounded pieces, by position,
//! and nothing is mapped.

use std::{fs::File, io, sync::Arc};

use object::{LittleEndian, elf};

use crate::launch::symbols::{Header, LE, ReadAt as _, Segment, Sym, read, read_many};

type Section = elf::SectionHeader64<LittleEndian>;

/// Most program headers and sections, and longest tables, that a file may have.
const MAX_SEGMENTS: u16 = 256;
const MAX_SECTIONS: u16 = 4096;
const MAX_SYMBOLS: u64 = 1 << 21;
const MAX_UNWIND: u64 = 192 << 20;
const MAX_NAME: usize = 4096;
/// A function whose size the file does not tell goes on to the next one, and no further than this.
const UNSIZED: u64 = 4096;

/// Bytes of a section with their address in the file's own terms.
#[derive(Clone, Debug)]
pub struct Part {
    /// Where it begins.
    pub address: u64,
    /// What is there.
    pub bytes: Arc<[u8]>,
}

/// A function: where it begins, how long it is, where its name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Function {
    address: u64,
    size: u64,
    name: u32,
}

/// A shared object or program.
#[derive(Debug)]
pub struct Binary {
    file: File,
    segments: Vec<Segment>,
    /// `.eh_frame_hdr` and `.eh_frame`.
    pub index: Option<Part>,
    /// `.eh_frame`.
    pub frames: Option<Part>,
    functions: Vec<Function>,
    names: u64,
    names_size: u64,
}

impl Binary {
    /// Reads a file; `None` if it is no 64-bit object.
    pub fn read(file: File) -> io::Result<Option<Self>> {
        let header: Header = match read(&file, 0) {
            Ok(header) => header,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        };
        let ident = &header.e_ident;
        let is_ours = ident.magic == elf::ELFMAG
            && ident.class == elf::ELFCLASS64
            && ident.data == elf::ELFDATA2LSB
            && usize::from(header.e_phentsize.get(LE)) == size_of::<Segment>()
            && header.e_phnum.get(LE) <= MAX_SEGMENTS
            && header.e_shnum.get(LE) <= MAX_SECTIONS;
        if !is_ours {
            return Ok(None);
        }
        let segments = read_many(
            &file,
            header.e_phoff.get(LE),
            u64::from(header.e_phnum.get(LE)),
        )?;
        let sections: Vec<Section> = if header.e_shoff.get(LE) == 0 {
            Vec::new()
        } else {
            read_many(
                &file,
                header.e_shoff.get(LE),
                u64::from(header.e_shnum.get(LE)),
            )?
        };
        let mut binary = Self {
            file,
            segments,
            index: None,
            frames: None,
            functions: Vec::new(),
            names: 0,
            names_size: 0,
        };
        binary.read_unwind(&sections, header.e_shstrndx.get(LE).0)?;
        binary.read_functions(&sections)?;
        Ok(Some(binary))
    }

    fn read_unwind(&mut self, sections: &[Section], names: u16) -> io::Result<()> {
        let Some(names) = sections.get(usize::from(names)) else {
            return Ok(());
        };
        let (names_at, names_size) = (names.sh_offset.get(LE), names.sh_size.get(LE));
        for section in sections {
            let name = self.text(names_at, names_size, u64::from(section.sh_name.get(LE)))?;
            let place = match name.as_str() {
                ".eh_frame" => &mut self.frames,
                ".eh_frame_hdr" => &mut self.index,
                _ => continue,
            };
            let size = section.sh_size.get(LE);
            if section.sh_type.get(LE) == elf::SHT_NOBITS || size > MAX_UNWIND {
                continue;
            }
            let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
            self.file.read_at(&mut bytes, section.sh_offset.get(LE))?;
            *place = Some(Part {
                address: section.sh_addr.get(LE),
                bytes: bytes.into(),
            });
        }
        Ok(())
    }

    /// The functions of the full table if there is one, else of those for the dynamic linker.
    fn read_functions(&mut self, sections: &[Section]) -> io::Result<()> {
        let table = [elf::SHT_SYMTAB, elf::SHT_DYNSYM]
            .into_iter()
            .find_map(|kind| {
                sections.iter().find(|section| {
                    section.sh_type.get(LE) == kind
                        && usize::try_from(section.sh_entsize.get(LE)) == Ok(size_of::<Sym>())
                })
            });
        let Some(table) = table else {
            return Ok(());
        };
        let names = usize::try_from(table.sh_link.get(LE))
            .ok()
            .and_then(|at| sections.get(at));
        let Some(names) = names else {
            return Ok(());
        };
        (self.names, self.names_size) = (names.sh_offset.get(LE), names.sh_size.get(LE));
        let count = (table.sh_size.get(LE) / size_of::<Sym>() as u64).min(MAX_SYMBOLS);
        let mut at = table.sh_offset.get(LE);
        let mut left = count;
        while left > 0 {
            /// A file that claims more than it has costs no more than that.
            const BATCH: u64 = 1 << 14;
            let batch = left.min(BATCH);
            let symbols: Vec<Sym> = read_many(&self.file, at, batch)?;
            self.functions.extend(
                symbols
                    .iter()
                    .filter(|symbol| {
                        matches!(symbol.st_type(), elf::STT_FUNC | elf::STT_GNU_IFUNC)
                            && symbol.st_shndx.get(LE) != elf::SHN_UNDEF
                            && symbol.st_value.get(LE) != 0
                    })
                    .map(|symbol| Function {
                        address: symbol.st_value.get(LE),
                        size: symbol.st_size.get(LE),
                        name: symbol.st_name.get(LE),
                    }),
            );
            at += batch * size_of::<Sym>() as u64;
            left -= batch;
        }
        self.functions.sort_unstable();
        Ok(())
    }

    fn text(&self, at: u64, size: u64, offset: u64) -> io::Result<String> {
        if offset >= size {
            return Ok(String::new());
        }
        let length = usize::try_from(size - offset)
            .unwrap_or(MAX_NAME)
            .min(MAX_NAME);
        let mut bytes = vec![0; length];
        self.file.read_at(&mut bytes, at.saturating_add(offset))?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(length);
        bytes.truncate(end);
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The address, in the file's own terms, of a place in the file where code is mapped from.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        self.segments
            .iter()
            .filter(|segment| {
                segment.p_type.get(LE) == elf::PT_LOAD
                    && segment.p_flags.get(LE).0 & elf::PF_X.0 != 0
            })
            .find_map(|segment| {
                // A mapping begins at the page that the segment begins in, which may be another one's last.
                let from = segment.p_offset.get(LE) & !0xfff;
                let until = segment
                    .p_offset
                    .get(LE)
                    .checked_add(segment.p_filesz.get(LE))?;
                (from..until).contains(&offset).then(|| {
                    offset
                        .wrapping_sub(segment.p_offset.get(LE))
                        .wrapping_add(segment.p_vaddr.get(LE))
                })
            })
    }

    /// The name, as it is in the file, of the function at an address in the file's own terms.
    pub fn function(&self, address: u64) -> Option<String> {
        let after = self
            .functions
            .partition_point(|function| function.address <= address);
        let function = self.functions.get(after.checked_sub(1)?)?;
        let size = if function.size == 0 {
            UNSIZED
        } else {
            function.size
        };
        let is_in = address - function.address < size;
        let name = is_in.then(|| self.text(self.names, self.names_size, u64::from(function.name)));
        name?.ok().filter(|name| !name.is_empty())
    }
}

/// A name as people know it.
pub fn demangle(name: &str) -> String {
    /// Longer ones are shown as they are: what they cost to read grows faster than they do.
    const LONGEST: usize = 2048;
    if name.len() > LONGEST {
        return name.to_owned();
    }
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        return format!("{rust:#}");
    }
    cpp_demangle::Symbol::new(name)
        .ok()
        .and_then(|symbol| symbol.demangle().ok())
        .unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_functions_have_names() {
        let own = Binary::read(File::open("/proc/self/exe").expect("own program"))
            .expect("readable")
            .expect("an object");
        assert!(own.index.is_some() && own.frames.is_some());
        let found = own
            .functions
            .iter()
            .filter_map(|function| own.function(function.address))
            .any(|name| name.contains("own_functions_have_names"));
        assert!(found);
        assert_eq!(own.function(u64::MAX), None);
    }

    #[test]
    fn names_are_made_readable() {
        assert_eq!(demangle("_ZN2at5emptyEv"), "at::empty()");
        assert_eq!(
            demangle("_RNvC6_123foo3bar"),
            "123foo::bar",
            "Rust's own way"
        );
        assert_eq!(demangle("cuMemAlloc_v2"), "cuMemAlloc_v2");
        let long = format!("_Z{}", "a".repeat(5000));
        assert_eq!(demangle(&long), long);
    }

    #[test]
    fn a_file_that_lies_about_itself_is_an_error_or_nothing() {
        use std::io::Write as _;
        let own = std::fs::read("/proc/self/exe").expect("own program");
        for at in (0..64).chain(64..1024) {
            for value in [0x7f, 0xff] {
                let mut head = own[..4096.min(own.len())].to_vec();
                head[at] = value;
                let mut file = tempfile::tempfile().expect("a file");
                file.write_all(&head).expect("written");
                // Must return, and not reserve memory for what is not there.
                drop(Binary::read(file));
            }
        }
    }
}
