"""`python -m tests.ranks.launcher ARGUMENT...` is torchrun, to be forked where torch is imported already."""

import os

from torch.distributed.run import main

if __name__ == "__main__":
    # Else a node that is started again because of another finds that one's addresses of before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    main()
