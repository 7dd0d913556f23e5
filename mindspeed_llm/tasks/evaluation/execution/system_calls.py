"""The system calls that a program written by a model may not make, by machine. Standard library only.

Numbers: Linux, arch/x86/entry/syscalls/syscall_64.tbl, and include/uapi/asm-generic/unistd.h for aarch64.
"""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the machines that are known here."""

_NONE = -1

_TABLE: dict[str, tuple[int, int]] = {
    # the network, and what could reach it by another way
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    # other processes
    "fork": (57, _NONE),
    "vfork": (58, _NONE),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # memory that the limit does not count
    "memfd_create": (319, 279),
    # limits, and what only an administrator does
    "setrlimit": (160, 164),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "fanotify_init": (300, 262),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    # of files what not every version of Landlock looks after: lengths, times, and who may read and write them
    "truncate": (76, 45),
    "utime": (132, _NONE),
    "utimes": (235, _NONE),
    "futimesat": (261, _NONE),
    "utimensat": (280, 88),
    "chmod": (90, _NONE),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, _NONE),
    "fchown": (93, 55),
    "lchown": (94, _NONE),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}

_CLONE = {"x86_64": 56, "aarch64": 220}
_OPEN = {"x86_64": 2}
_OPENAT = {"x86_64": 257, "aarch64": 56}
_IOCTL = {"x86_64": 16, "aarch64": 29}
# Their arguments are in memory, which a filter cannot read; without them the C library takes the older calls.
_IN_MEMORY = (435, 437)  # clone3, openat2
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
_ACCESS_MODE, _TRUNCATE = 0x3, 0x200
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: what a terminal takes for typed

# struct sock_filter of the classic BPF: operation, jump where true, jump where false, operand
Instruction = tuple[int, int, int, int]
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_ERROR = 0x00050000
_EPERM, _ENOSYS = 1, 38
# offsets in struct seccomp_data
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16


def filter_program(machine: str) -> list[Instruction]:
    """The seccomp filter of a machine: denied calls fail with EPERM, new threads are allowed, new processes are not.

    Raises:
        KeyError: the machine is none of ARCHITECTURES.
    """
    column = list(ARCHITECTURES).index(machine)
    denied = [numbers[column] for numbers in _TABLE.values() if numbers[column] != _NONE]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # A second set of numbers for the same calls on x86_64.
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in denied:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
    for number in _IN_MEMORY:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    # Opened without the right to write (O_RDONLY, or both bits), a file can be emptied all the same.
    for number, place in ((_OPEN.get(machine, _NONE), 1), (_OPENAT[machine], 2)):
        if number != _NONE:
            program += [
                (_EQUAL, 0, 6, number),
                (_LOAD, 0, 0, _ARGUMENTS + place * 8),
                (_MASK, 0, 0, _ACCESS_MODE | _TRUNCATE),
                (_EQUAL, 1, 0, _TRUNCATE),
                (_EQUAL, 0, 1, _ACCESS_MODE | _TRUNCATE),
                (_RETURN, 0, 0, _ERROR | _EPERM),
                (_RETURN, 0, 0, _ALLOW),
            ]
    program += [(_EQUAL, 0, 4 + len(_TERMINAL_INPUT) - 1, _IOCTL[machine]), (_LOAD, 0, 0, _ARGUMENTS + 8)]
    program += [(_EQUAL, len(_TERMINAL_INPUT) - n, 0, what) for n, what in enumerate(_TERMINAL_INPUT)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | _EPERM)]
    program += [
        (_EQUAL, 0, 4, _CLONE[machine]),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    # Limits may be read: the third argument, the new ones, is null then.
    third = _ARGUMENTS + 2 * 8
    program += [
        (_EQUAL, 0, 5, _PRLIMIT[machine]),
        (_LOAD, 0, 0, third),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, third + 4),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERROR | _EPERM),
    ]
    return [*program, (_RETURN, 0, 0, _ALLOW)]
