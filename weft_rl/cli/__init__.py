from weft_rl.logs import leave_out_noise

leave_out_noise()
