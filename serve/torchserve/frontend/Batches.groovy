import groovy.transform.CompileStatic
import java.util.concurrent.BlockingQueue
import org.pytorch.serve.job.Job
import org.pytorch.serve.util.messages.BaseModelRequest
import org.pytorch.serve.util.messages.ModelInferenceRequest
import org.pytorch.serve.util.messages.ModelLoadModelRequest
import org.pytorch.serve.util.messages.ModelWorkerResponse
import org.pytorch.serve.util.messages.Predictions
import org.pytorch.serve.util.messages.RequestInput
import org.pytorch.serve.wlm.BatchAggregator
import org.pytorch.serve.wlm.Model
import org.pytorch.serve.wlm.WorkerState

/**
 * What one worker has in hand, in the place of TorchServe's BatchAggregator. 0.12 forgets the requests of a batch whose
 * worker dies while others are awaited for it, and those that an answer does not speak of; and it takes what a worker
 * wrote last for the first answer of the one that follows. Here each request is answered once, or put back.
 */
@CompileStatic
class Batches extends BatchAggregator {
    static final String DIED =
            'the worker that had this request has died, and another is being started: try again later'

    private static final String SERVER_TIMING = 'Server-Timing'  // as handler.py writes it
    private static final String WAITED = 'serve:frontend-ms'  // as handler.py reads it
    private static final boolean LOGS_REQUESTS = System.getProperty('serve.access_level') == 'info'

    private final Model model
    private final ModelQueue queue
    private final BlockingQueue<ModelWorkerResponse> replies

    /**
     * @param model the worker's
     * @param queue of that model
     * @param jobs what it has in hand now
     * @param replies what it has answered, and nobody has read
     */
    Batches(Model model, ModelQueue queue, Map<String, Job> jobs, BlockingQueue<ModelWorkerResponse> replies) {
        super(model)
        this.model = model
        this.queue = queue
        this.replies = replies
        this.jobs = Collections.synchronizedMap(jobs)
    }

    /** The requests now, for who counts them. */
    List<Job> held() {
        return new ArrayList<Job>(jobs.values())
    }

    @Override
    BaseModelRequest getRequest(String thread, WorkerState state) {
        try {
            BaseModelRequest request = super.getRequest(thread, state)
            if (request instanceof ModelLoadModelRequest) {
                replies.clear()  // of the process before this one
            } else if (LOGS_REQUESTS && request instanceof ModelInferenceRequest) {
                tellWaiting((ModelInferenceRequest) request)
            }
            return request
        } catch (Exception fault) {
            putBack()  // nothing of it has been sent to the worker
            throw fault
        }
    }

    @Override
    void pollBatch(String thread, WorkerState state) {
        super.pollBatch(thread, state)
        queue.fill(jobs)
    }

    @Override
    boolean sendResponse(ModelWorkerResponse message) {
        if (message.getCode() != 200) {
            answerAll(message.getCode(), message.getMessage())
            return true
        }
        boolean done = true
        for (Predictions prediction : message.getPredictions()) {
            boolean more = prediction.getHeaders().get(RequestInput.TS_STREAM_NEXT) == 'true'
            String id = prediction.getRequestId()
            Job job = more ? jobs.get(id) : jobs.remove(id)
            if (job == null) {
                throw new IllegalStateException("the worker answers what it was not asked: $id")
            }
            done = done && !more
            if (more || queue.take(job)) {
                job.response(prediction.getResp(), prediction.getContentType(), prediction.getStatusCode(),
                        prediction.getReasonPhrase(), timed(job, prediction.getHeaders()))
            }
        }
        if (done) {
            cleanJobs()
        }
        return done
    }

    /**
     * A worker's headers, and before its stages the ms that the request waited here: from when it was whole until it was
     * sent to the worker that answers, with what one that died before had it for.
     */
    private Map<String, String> timed(Job job, Map<String, String> headers) {
        String frontend = "frontend;dur=${waitedMs(job)}".toString()
        String stages = headers.get(SERVER_TIMING)
        Map<String, String> all = new LinkedHashMap<String, String>(headers)
        all.put(SERVER_TIMING, stages == null ? frontend : "$frontend, $stages".toString())
        if (stages != null) {
            StageTimes.observe(model, all.get(SERVER_TIMING))
        }
        return all
    }

    /** For the worker's line of each request. */
    private void tellWaiting(ModelInferenceRequest batch) {
        for (RequestInput request : batch.getRequestBatch()) {
            request.updateHeaders(WAITED, waitedMs(jobs.get(request.getRequestId())))
        }
    }

    private static String waitedMs(Job job) {
        return String.format(Locale.ROOT, '%.2f', (job.getScheduled() - job.getBegin()) / 1e6d)
    }

    /** A worker has died (with what it was asked), or is told to go (null). */
    @Override
    void sendError(BaseModelRequest asked, String error, int status) {
        if (asked instanceof ModelLoadModelRequest) {
            super.sendError(asked, error, status)
        } else if (asked == null && !queue.isClosed()) {
            putBack()
        } else {
            boolean died = error == 'Worker died.'
            answerAll(died ? 503 : status, died ? DIED : error)
        }
    }

    /** TorchServe forgets what is left here; nothing may be. */
    @Override
    void cleanJobs() {
        if (jobs != null) {
            answerAll(503, DIED)
        }
    }

    private void answerAll(int status, String message) {
        for (Job job : taken()) {
            if (queue.take(job)) {
                job.sendError(status, message)
            }
        }
    }

    private void putBack() {
        for (Job job : taken().reverse()) {
            if (!job.isControlCmd()) {
                queue.addFirst(job)
            }
        }
    }

    private List<Job> taken() {
        synchronized (jobs) {
            List<Job> all = new ArrayList<Job>(jobs.values())
            jobs.clear()
            return all
        }
    }
}
